# The server, in an image of its own; docs/deploying.md says how to build and run it.
#
#     docker build --tag speculative-t5 .
#     docker run --rm --publish 127.0.0.1:8080:8080 --volume models:/models speculative-t5
#
# BASE has to have Python 3.11 or newer as `python`, and glibc 2.35 or newer, for MLX.
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /source
COPY . .
ARG EXTRAS=serve
RUN python -m venv /opt/speculative-t5 \
    && /opt/speculative-t5/bin/python -m pip install --no-cache-dir ".[${EXTRAS}]"

FROM ${BASE}
COPY --from=build /opt/speculative-t5 /opt/speculative-t5
RUN useradd --uid 1000 --create-home server && install --directory --owner server /models
USER server
# Models that are named are looked for here first, and what is downloaded is kept here.
ENV SPECULATIVE_T5_WEIGHTS=/models HF_HOME=/models/huggingface XDG_CACHE_HOME=/models/cache
VOLUME /models
EXPOSE 8080
HEALTHCHECK --start-period=10m CMD ["/opt/speculative-t5/bin/python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["/opt/speculative-t5/bin/speculative-t5", "serve", "--host", "0.0.0.0"]
