"""The page at `/`."""

PAGE = "<!doctype html><title>speculative_t5</title><p>The server runs.</p>"
CSP = "default-src 'none'; style-src 'unsafe-inline'"
