# hadolint global ignore=DL3008,DL3066
# Stand-ins for the images that deploy/compose.yaml and deploy/stack.yaml name, from Debian's packages, for machines that
# reach no container registry. User, entry point and paths are those of the official images.
#
#   docker build --target haproxy -t haproxy:stand-in - < tests/deploy/standins.Dockerfile
FROM python:3.11-slim-bookworm AS debian
# Packages start no services in a container that is being built: policy-rc.d.
RUN printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d \
 && apt-get update \
 && apt-get install --yes --no-install-recommends haproxy prometheus prometheus-alertmanager \
 && rm -rf /var/lib/apt/lists/*

FROM debian AS haproxy
USER haproxy
# As in the official image: haproxy reads USR1 as the signal to stop softly, TERM as the one to stop at once.
STOPSIGNAL SIGUSR1
ENTRYPOINT ["haproxy"]
CMD ["-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]

FROM debian AS prometheus
RUN mkdir /prometheus && chown nobody:nogroup /prometheus
USER nobody
ENTRYPOINT ["prometheus"]

FROM debian AS alertmanager
RUN mkdir /alertmanager && chown nobody:nogroup /alertmanager
USER nobody
ENTRYPOINT ["prometheus-alertmanager"]
