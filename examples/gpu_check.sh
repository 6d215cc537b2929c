#!/usr/bin/env bash
# Checks on one GPU, in under five minutes, what cannot be checked without: vLLM with the trainer on the same GPU.
# Run it from a checkout in an environment with agentgym's test extra and vLLM:
#     pip install -e '.[test]' && python -m agentgym.trainer.rollout.vllm_install --gpu && examples/gpu_check.sh
set -euo pipefail
cd "$(dirname "$0")/.."
nvidia-smi --list-gpus
start=$SECONDS
timeout 290 python -m pytest -m gpu --durations=0 tests
echo "GPU checks passed in $((SECONDS - start)) s"
