# An image of ours in the place of TGI's: port 80, downloads in /data, root as there, since the volumes of a deployment
# of TGI belong to root, and `text-generation-launcher` for manifests that name it. docs/moving.md says how to use it.

ARG IMAGE=lockstep:cuda
FROM $IMAGE
COPY --chmod=755 deploy/docker/entry.py /opt/lockstep/bin/text-generation-launcher
ENV PORT=80 HF_HOME=/data
# hadolint ignore=DL3002
USER 0:0
EXPOSE 80 8080
# TGI's has none either: its users give ports as flags, of which a check in the image knows nothing.
HEALTHCHECK NONE
ENTRYPOINT ["text-generation-launcher"]
CMD []
