#!/bin/sh
# Makes the environment that SGLang's workers run in on a machine WITHOUT a GPU, for tests and CI:
#
#     tools/setup_sglang.sh python3.11 .venv-sglang
#
# Exact versions are in constraints-sglang.txt. It takes some five minutes and 3 GB, and can be run
# again: what is there stays. With a GPU none of this is needed: install Triptych beside your SGLang
# (`pip install -e '.[media]'`) and name it with --engine-python.
#
# What SGLang itself needs to run on a CPU, beyond packages, is in tests/sglang/harness.
set -eu
python=$1
venv=$2
cd "$(dirname "$0")/.."
stamp=$venv/.set-up
digest=$(cat constraints-sglang.txt pyproject.toml tools/setup_sglang.sh tools/cpu_torch*.py | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$digest" ]; then
    touch "$stamp"
    exit 0
fi
rm -f "$stamp"
echo "Setting up $venv for SGLang on a CPU: some five minutes the first time ..."
echo "(pip will say that sglang asks for more, and for other versions: on a CPU it does without.)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" tools/cpu_torch.py
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
# torch first: whatever asks for a newer one would bring gigabytes for CUDA.
pip install -c constraints-sglang.txt torch
# These ask for CUDA builds of torch and of much else, and do without on a CPU.
pip install --no-deps -c constraints-sglang.txt sglang torchvision xgrammar nixl-cu13
# What SGLang imports on the way to the models that Triptych serves.
pip install -c constraints-sglang.txt \
    apache-tvm-ffi compressed-tensors dill einops fastapi gguf ipython mistral_common nvidia-ml-py \
    orjson partial-json-parser psutil pydantic python-multipart pyzmq requests scipy sentencepiece \
    setproctitle soundfile tiktoken timm transformers triton uvicorn watchfiles zstandard
"$venv/bin/python" tools/cpu_torchvision.py
pip install -c constraints-sglang.txt -e '.[media,cluster]' openai pytest pytest-asyncio pytest-rerunfailures pytest-timeout
"$venv/bin/python" -c 'import nixl_cu13, sglang, torch, torchvision, triptych; assert torch.version.cuda is None'
echo "$digest" > "$stamp"
