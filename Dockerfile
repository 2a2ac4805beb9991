FROM python:3.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY worker worker
COPY messages messages
COPY sql sql
RUN python -m venv /opt/volume-worker \
    && /opt/volume-worker/bin/pip install --no-cache-dir .

FROM python:3.13-slim-bookworm
# The policy keeps tgt's package from starting a daemon while the image is built.
RUN printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d \
    && chmod +x /usr/sbin/policy-rc.d \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        e2fsprogs libnbd-bin qemu-block-extra qemu-system-common qemu-utils tgt \
    && rm -rf /var/lib/apt/lists/* /usr/sbin/policy-rc.d \
    && useradd --system --uid 10001 --user-group --home-dir /var/lib/volume-worker volume-worker \
    # A new named volume takes the owner of the folder that it covers.
    && install -d -o volume-worker -g volume-worker -m 0750 /var/lib/volume-worker /srv/volumes
COPY --from=build /opt/volume-worker /opt/volume-worker
ENV PATH=/opt/volume-worker/bin:$PATH \
    PYTHONUNBUFFERED=1
USER volume-worker
WORKDIR /var/lib/volume-worker
VOLUME ["/var/lib/volume-worker", "/srv/volumes"]
EXPOSE 8776 10809
ENTRYPOINT ["volume-worker"]
CMD ["run"]
