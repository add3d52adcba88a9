"""Products and attention of few rows on Metal by kernels of our own."""
