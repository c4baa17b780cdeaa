#!/bin/bash
# Serves smollm2-135m-l40s. Ports: HTTP_PORT, GRPC_PORT, METRICS_PORT.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
HTTP_PORT=${HTTP_PORT:-8000} GRPC_PORT=${GRPC_PORT:-8001} METRICS_PORT=${METRICS_PORT:-8002}
python3 -m build_engines verify "$HERE"
exec /opt/tritonserver/bin/tritonserver --model-repository="$HERE/model_repo" --disable-auto-complete-config --http-port="$HTTP_PORT" --grpc-port="$GRPC_PORT" --metrics-port="$METRICS_PORT" --backend-config=python,thread-pool-size=148
