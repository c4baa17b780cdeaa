#!/bin/bash
# Builds smollm2-135m-l40s for trtllm. Run it inside nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3
# on the machine with the GPUs; what is up to date is not made again.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TRTLLM_SOURCE=${TRTLLM_SOURCE:-$HERE/.tensorrt-llm}      # examples of release 1.2.1
MODELOPT_SOURCE=${MODELOPT_SOURCE:-$HERE/.model-optimizer}  # examples of ModelOpt

say() { printf '\n== %s\n' "$1"; }
# A directory is made beside its place and moved there when it is whole.
make_directory() { # place, command…
    local place=$1; shift
    [ -e "$place" ] && { echo "$place is there"; return; }
    rm -rf "$place.part"
    "$@" "$place.part"
    mv "$place.part" "$place"
}

python3 - <<'CHECK'
import sys
try:
    import tensorrt_llm
except ImportError:
    sys.exit("TensorRT-LLM is not installed here; run this inside nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3.")
if tensorrt_llm.__version__ != "1.2.1":
    sys.exit(f"TensorRT-LLM here is {tensorrt_llm.__version__}; this script was written for 1.2.1. "
             "Run it inside nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3.")
CHECK

[ -d "$TRTLLM_SOURCE" ] || git clone --quiet --depth 1 --branch v1.2.1 https://github.com/NVIDIA/TensorRT-LLM.git "$TRTLLM_SOURCE"

say "compile the engine"
if [ "$(cat "$HERE/engine"/.made-by 2>/dev/null)" != b7e2b63c1e2f372c ]; then
rm -rf "$HERE/engine.part"
trtllm-build \
    --checkpoint_dir "$HERE/trtllm-checkpoint" \
    --output_dir "$HERE/engine.part" \
    --max_batch_size 128 \
    --max_input_len 8191 \
    --max_seq_len 8192 \
    --max_num_tokens 8192 \
    --max_beam_width 4 \
    --kv_cache_type paged \
    --tokens_per_block 32 \
    --remove_input_padding enable \
    --context_fmha enable \
    --use_paged_context_fmha enable \
    --use_fp8_context_fmha enable \
    --gpt_attention_plugin auto \
    --gemm_plugin disable \
    --workers 1 \
    --log_level info
printf b7e2b63c1e2f372c > "$HERE/engine.part"/.made-by
rm -rf "$HERE/engine"
mv "$HERE/engine.part" "$HERE/engine"
else echo "$HERE/engine" is up to date; fi

say "describe the tokenizer for constrained decoding"
if [ "$(cat "$HERE/xgrammar"/.made-by 2>/dev/null)" != 8dc9dbd474e5f657 ]; then
rm -rf "$HERE/xgrammar.part"
python3 "$TRTLLM_SOURCE/examples/generate_xgrammar_tokenizer_info.py" --model_dir "$HERE/weights" --output_dir "$HERE/xgrammar.part"
printf 8dc9dbd474e5f657 > "$HERE/xgrammar.part"/.made-by
rm -rf "$HERE/xgrammar"
mv "$HERE/xgrammar.part" "$HERE/xgrammar"
else echo "$HERE/xgrammar" is up to date; fi

say "recording versions"
python3 -m build_engines record "$HERE"
