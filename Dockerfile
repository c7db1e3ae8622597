# The service: HTTP on port 8000, the checkpoint in /checkpoint. Training is not included.
#
#   docker build -t chargpt .
#   docker run --rm -p 127.0.0.1:8000:8000 --read-only chargpt
#
# Without torch, which the native engine does not need. More, such as CUDA and other checkpoints: deploy/README.md
ARG BASE=python:3.11-slim-bookworm
FROM scratch AS checkpoint
COPY service/checkpoints/tinyshakespeare /
FROM scratch AS wheels

# A compiler of the same Debian as the last stage, whose libstdc++ the libraries use.
FROM ${BASE} AS compiler
# Debian keeps one version of g++ per release: a pinned one would be gone after its next security update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -r /var/lib/apt/lists
WORKDIR /src
COPY setup.py .
COPY service/engine/native.cpp service/engine/
COPY service/engine/native service/engine/native
RUN CXXFLAGS=-s python setup.py --quiet build_ext --build-lib /native \
 && python -c "from setup import *; [open(f'/native/service/engine/_native_{name}.so') for name in VARIANTS[SOURCE]]"
FROM scratch AS native
COPY --from=compiler /native /

# What is installed, with hashes: deploy/image/cpu.txt, torch.txt or cuda.txt. PyTorch's index has the CPU build of torch,
# PyPI that with CUDA; pip may take a file from either, as its hash decides.
FROM ${BASE} AS dependencies
ARG ACCELERATOR=cpu
ARG TORCH_INDEX_URL
COPY deploy/image/${ACCELERATOR}.txt /lock.txt
# Torch's own tests and its headers for extensions take 190 MB, the tests of other packages 23. Of the bytecode that pip
# would compile, 147 MB with torch, the service loads 23, which the import below writes. Nobody needs the packages'
# commands.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    export PIP_PYTHON=/venv/bin/python PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 \
 && if [ "$ACCELERATOR" = torch ]; then index=${TORCH_INDEX_URL-https://download.pytorch.org/whl/cpu}; fi \
 && python -m venv --without-pip /venv \
 && pip install --no-compile --no-deps --only-binary :all: --require-hashes \
    ${index:+--extra-index-url "$index"} -r /lock.txt \
 && pip check \
 && torch=/venv/lib/python3.11/site-packages/torch \
 && if [ -d "$torch" ]; then \
      rm -rf "$torch/include" "$torch/test"; find "$torch/bin" -type f ! -name torch_shm_manager -delete; fi \
 && find /venv/lib -type d -name tests -prune -exec rm -r {} + \
 && find /venv/bin -type f -delete \
 && /venv/bin/python -c "import litserve, opentelemetry.exporter.otlp.proto.http.trace_exporter, pydantic_settings, safetensors" \
 && if [ -d "$torch" ]; then /venv/bin/python -c "import torch"; fi

FROM ${BASE} AS wheel
WORKDIR /src
COPY deploy/image/build.txt .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r build.txt
COPY pyproject.toml setup.py ./
COPY service service
# The native libraries have their own stage. pyproject.toml also names the package training; an empty folder installs
# nothing.
ARG VERSION=0.0
RUN rm -r service/checkpoints \
 && mkdir training \
 && SETUPTOOLS_SCM_PRETEND_VERSION_FOR_CHARGPT="$VERSION" \
    pip wheel --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir /dist .

FROM dependencies AS package
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    PIP_PYTHON=/venv/bin/python pip install --disable-pip-version-check --no-cache-dir --no-index --no-deps --target /package /dist/*.whl \
 && mv /package/bin /scripts

FROM ${BASE}
# Nothing in a container installs packages or becomes another user: no pip, and no program with the rights of its owner.
RUN export PYTHONDONTWRITEBYTECODE=1 \
 && useradd --uid 10001 --no-create-home --home-dir /tmp chargpt \
 && pip uninstall --yes --root-user-action ignore --disable-pip-version-check setuptools wheel pip \
 && rm -r "$(python -c 'import ensurepip; print(*ensurepip.__path__)')" \
 && find / -xdev -type f -perm /6000 -exec chmod ug-s {} +
# Two layers: a new version of the service transfers kilobytes, not its packages.
COPY --from=dependencies /venv /venv
COPY --from=package /package /venv/lib/python3.11/site-packages
COPY --from=native / /venv/lib/python3.11/site-packages
COPY --from=package /scripts /venv/bin
COPY --from=checkpoint / /checkpoint
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CHARGPT_HOST=:: \
    CHARGPT_PORT=8000 \
    CHARGPT_CHECKPOINT=/checkpoint
USER 10001
EXPOSE 8000
# Without an interpreter unless TLS needs one: on a busy machine, a Python that starts takes longer than the timeout. Five
# minutes for the start: where a machine is busy, as after a reboot, swarm would replace a container that is slow to start
# by one that is as slow.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --start-interval=1s CMD ["bash", "-c", "\
  if [ -n \"$CHARGPT_TLS_CERTIFICATE\" ]; then \
    exec python -Ic 'import http.client as h, os, ssl, sys; c = h.HTTPSConnection(\"127.0.0.1\", os.environ[\"CHARGPT_PORT\"], timeout=4, context=ssl._create_unverified_context()); c.request(\"GET\", \"/readyz\"); sys.exit(c.getresponse().status != 200)'; \
  fi; \
  exec 3<>/dev/tcp/127.0.0.1/$CHARGPT_PORT && printf 'GET /readyz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && \
  read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
ARG BASE
ARG VERSION=0.0
LABEL org.opencontainers.image.title="chargpt" \
      org.opencontainers.image.description="HTTP service for character-level GPT checkpoints" \
      org.opencontainers.image.base.name="$BASE" \
      org.opencontainers.image.version="$VERSION"
# Docker takes any signal for a stop, and does not restart the container after one, unless this is set: SIGHUP is none.
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "service"]
