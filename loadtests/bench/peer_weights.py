"""The demo model's GGUF file with its weights in another type, since a peer is not equally fast with all of them.

Knows nothing of engines.
"""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

KINDS = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


def convert(source: Path, target: Path, kind: str) -> Path:
    """Write `source` with every matrix as `kind` (f16 or q8_0), unless it is there already; returns `target`."""
    if target.exists():
        return target
    matrix_type, file_type = KINDS[kind]
    reader = GGUFReader(source)
    half_written = target.with_suffix(".part")
    writer = GGUFWriter(half_written, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        wanted = matrix_type if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half_written.rename(target)
    return target
