"""Packing of a safetensors file: removal of bytes that no tensor uses, in holes and after the last tensor."""

from __future__ import annotations

from ckptfix.checkpoint import ByteRange, Checkpoint, OutputFile, Plan, Segment
from ckptfix.errors import Truncated
from ckptfix.formats.safetensors.edit import merged
from ckptfix.formats.safetensors.header import METADATA, header_of
from ckptfix.formats.safetensors.write import framed, metadata_text, quoted
from ckptfix.io.source import truncated_hint


def plan_packed(checkpoint: Checkpoint, dest: str) -> tuple[Plan, int]:
    """Plan the file with its tensors packed in the order of their bytes, and return it with the number of bytes saved.

    Tensors that overlap still overlap in the same way. Names, order, metadata and values are unchanged.

    Raises:
        Truncated: a tensor's bytes extend beyond the end of the file.
    """
    header = header_of(checkpoint)
    spans = sorted({(row.begin, row.stop) for row in header.rows if row.stop > row.begin})
    beyond = next((stop - header.data_size for _, stop in spans if stop > header.data_size), 0)
    if beyond:
        message = f"a tensor ends {beyond} bytes beyond the end of the file"
        raise Truncated(message, path=checkpoint.path, offset=header.size, hint=truncated_hint(checkpoint.path))
    runs = merged(spans)
    unused = header.data_size - sum(stop - begin for begin, stop in runs)
    if not unused:
        return Plan((OutputFile.of(dest, (ByteRange(header.path, 0, header.size),)),)), 0
    moved: dict[int, int] = {}
    segments: list[Segment] = []
    end = 0
    for begin, stop in runs:
        moved[begin] = end
        segments.append(ByteRange(header.path, header.data_start + begin, stop - begin))
        end += stop - begin
    items = []
    if header.metadata is not None:
        items.append(f"{quoted(METADATA)}:{metadata_text((pair.key, pair.value) for pair in header.pairs)}")
    starts = sorted(moved)
    for row in header.rows:
        begin = _moved(row.begin, starts, moved) if row.stop > row.begin else 0
        sizes = ",".join(map(str, row.shape))
        offsets = f"[{begin},{begin + row.stop - row.begin}]"
        items.append(f'{quoted(row.key)}:{{"dtype":{quoted(row.code)},"shape":[{sizes}],"data_offsets":{offsets}}}')
    whole = framed("{" + ",".join(items) + "}", segments, dest)
    return Plan((OutputFile.of(dest, whole),)), unused


def _moved(place: int, starts: list[int], moved: dict[int, int]) -> int:
    from bisect import bisect_right

    start = starts[bisect_right(starts, place) - 1]
    return moved[start] + place - start
