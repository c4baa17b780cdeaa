#!/bin/bash
# Builds llama-3.3-70b-h100-tp4 for trtllm. Run it inside nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3
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

say "weights: meta-llama/Llama-3.3-70B-Instruct"
if [ -d meta-llama/Llama-3.3-70B-Instruct ]; then [ -e "$HERE/weights" ] || ln -s "$(realpath meta-llama/Llama-3.3-70B-Instruct)" "$HERE/weights"
else make_directory "$HERE/weights" hf download meta-llama/Llama-3.3-70B-Instruct --local-dir
fi

say "quantise the weights"
if [ "$(cat "$HERE/trtllm-checkpoint"/.made-by 2>/dev/null)" != c7a3f8b15fd0e5fb ]; then
rm -rf "$HERE/trtllm-checkpoint.part"
python3 "$TRTLLM_SOURCE/examples/quantization/quantize.py" \
    --model_dir "$HERE/weights" \
    --output_dir "$HERE/trtllm-checkpoint.part" \
    --dtype auto \
    --qformat fp8 \
    --tp_size 4 \
    --pp_size 1 \
    --kv_cache_dtype fp8
printf c7a3f8b15fd0e5fb > "$HERE/trtllm-checkpoint.part"/.made-by
rm -rf "$HERE/trtllm-checkpoint"
mv "$HERE/trtllm-checkpoint.part" "$HERE/trtllm-checkpoint"
else echo "$HERE/trtllm-checkpoint" is up to date; fi

say "compile the engine"
if [ "$(cat "$HERE/engine"/.made-by 2>/dev/null)" != 8d0b82ec93205a2d ]; then
rm -rf "$HERE/engine.part"
trtllm-build \
    --checkpoint_dir "$HERE/trtllm-checkpoint" \
    --output_dir "$HERE/engine.part" \
    --max_batch_size 256 \
    --max_input_len 32767 \
    --max_seq_len 32768 \
    --max_num_tokens 8192 \
    --max_beam_width 1 \
    --kv_cache_type paged \
    --tokens_per_block 32 \
    --remove_input_padding enable \
    --context_fmha enable \
    --use_paged_context_fmha enable \
    --use_fp8_context_fmha enable \
    --gpt_attention_plugin auto \
    --gemm_plugin disable \
    --workers 4 \
    --log_level info
printf 8d0b82ec93205a2d > "$HERE/engine.part"/.made-by
rm -rf "$HERE/engine"
mv "$HERE/engine.part" "$HERE/engine"
else echo "$HERE/engine" is up to date; fi

say "describe the tokenizer for constrained decoding"
if [ "$(cat "$HERE/xgrammar"/.made-by 2>/dev/null)" != 45cc9285e64f0c4e ]; then
rm -rf "$HERE/xgrammar.part"
python3 "$TRTLLM_SOURCE/examples/generate_xgrammar_tokenizer_info.py" --model_dir "$HERE/weights" --output_dir "$HERE/xgrammar.part"
printf 45cc9285e64f0c4e > "$HERE/xgrammar.part"/.made-by
rm -rf "$HERE/xgrammar"
mv "$HERE/xgrammar.part" "$HERE/xgrammar"
else echo "$HERE/xgrammar" is up to date; fi

say "recording versions"
python3 -m build_engines record "$HERE"
