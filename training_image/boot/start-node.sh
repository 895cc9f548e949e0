#!/bin/bash
# Runs the training image on this node until its agent ends.
#
# Reads from /etc/holdfast/environment (written by the launch template's user data): HOLDFAST_IMAGE, and the agent's own
# HOLDFAST_STACK, HOLDFAST_ORDERS_TABLE, HOLDFAST_REPORT_QUEUE_URL, HOLDFAST_BUCKET.
set -euo pipefail

readonly environment_file=/etc/holdfast/environment
readonly node_root=/var/lib/holdfast

set -a
# shellcheck source=/dev/null
source "${environment_file}"
set +a

log_in_to_ecr() {
  local registry="${HOLDFAST_IMAGE%%/*}"
  case "${registry}" in
    *.dkr.ecr.*.amazonaws.com)
      local region="${registry#*.dkr.ecr.}"
      region="${region%%.*}"
      aws ecr get-login-password --region "${region}" \
        | docker login --username AWS --password-stdin "${registry}"
      ;;
  esac
}

accelerator_options() {
  if [[ -e /dev/nvidiactl ]]; then
    printf '%s\n' --gpus all
  fi
  if [[ -d /dev/infiniband ]]; then
    printf '%s\n' --device /dev/infiniband
  fi
}

main() {
  mkdir -p "${node_root}"
  log_in_to_ecr
  local options
  mapfile -t options < <(accelerator_options)
  # Host network: gloo, NCCL and EFA bind to the node's own interfaces, and a container hop would hide the metadata.
  # /dev/shm of the host: NCCL and the checkpoint writers stage there, and docker's default is 64 MiB.
  exec docker run --rm --name holdfast-agent --network host --volume /dev/shm:/dev/shm \
    --ulimit memlock=-1 --ulimit nofile=1048576 \
    --env-file "${environment_file}" --volume "${node_root}:${node_root}" \
    "${options[@]}" "${HOLDFAST_IMAGE}"
}

main "$@"
