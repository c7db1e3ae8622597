# The service: HTTP on port 8000, the checkpoint in /checkpoint. Training is not included.
#
#   docker build -t chargpt .
#   docker run --rm -p 127.0.0.1:8000:8000 --read-only --tmpfs /tmp chargpt
#
# More, such as other checkpoints and builds of torch: deploy/README.md
FROM scratch AS checkpoint
COPY service/checkpoints/tinyshakespeare /
FROM scratch AS wheels

# A compiler of the same Debian as the last stage, whose libstdc++ the libraries use.
FROM python:3.11-slim-bookworm AS compiler
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /src
COPY setup.py .
COPY service/engine/native.cpp service/engine/
RUN CXXFLAGS=-s python setup.py --quiet build_ext --build-lib /native \
 && ls /native/service/engine/_native_base.so
FROM scratch AS native
COPY --from=compiler /native /

FROM python:3.11-slim-bookworm AS dependencies
WORKDIR /src
COPY pyproject.toml .
RUN python -m venv --without-pip /venv \
 && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*p['dependencies'], *p['optional-dependencies']['service'], sep='\n')" > requirements.txt \
 && grep ^torch requirements.txt > torch.txt
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
# Torch's own tests and its headers for extensions take 190 MB, the tests of other packages 23. Of the 147 MB of bytecode
# that pip would compile, the service loads 23, which the import below writes.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    export PIP_PYTHON=/venv/bin/python PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 \
 && pip install --no-compile --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r torch.txt \
 && pip install --no-compile -r requirements.txt \
 && torch=/venv/lib/python3.11/site-packages/torch \
 && rm -r "$torch/include" "$torch/test" \
 && find "$torch/bin" -type f ! -name torch_shm_manager -delete \
 && find /venv/lib -type d -name tests -prune -exec rm -r {} + \
 && /venv/bin/python -c "import litserve, pydantic_settings, torch"

FROM dependencies AS package
COPY service service
RUN rm -r service/checkpoints
# pyproject.toml also names the package training; an empty folder installs nothing.
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir training \
 && PIP_PYTHON=/venv/bin/python pip install --disable-pip-version-check --no-deps --target /package . \
 && mv /package/bin /scripts

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="chargpt" \
      org.opencontainers.image.description="HTTP service for character-level GPT checkpoints"
RUN useradd --uid 10001 --no-create-home --home-dir /tmp chargpt
# Two layers: a new version of the service transfers kilobytes, not torch.
COPY --from=dependencies /venv /venv
COPY --from=package /package /venv/lib/python3.11/site-packages
COPY --from=native / /venv/lib/python3.11/site-packages
COPY --from=package /scripts /venv/bin
COPY --from=checkpoint / /checkpoint
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CHARGPT_HOST=0.0.0.0 \
    CHARGPT_PORT=8000 \
    CHARGPT_CHECKPOINT=/checkpoint
USER 10001
EXPOSE 8000
# http.client, because urllib would use a proxy set in the environment.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --start-interval=1s CMD ["python", "-Ic", \
  "import http.client as h, os, ssl, sys; e = os.environ; tls = {'context': ssl._create_unverified_context()} if e.get('CHARGPT_TLS_CERTIFICATE') else {}; c = (h.HTTPSConnection if tls else h.HTTPConnection)('127.0.0.1', e['CHARGPT_PORT'], timeout=4, **tls); c.request('GET', '/readyz'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["python", "-m", "service"]
