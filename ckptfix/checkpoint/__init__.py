"""The data model: the parts of a checkpoint, the edits to it, and the plan of an output. All frozen, and without I/O.

Tensor data is represented by its position, a `ByteRange`, rather than by its value. An output is a sequence of
segments: literal ``bytes`` (a header, a pickle, padding), a `ByteRange` that the kernel copies, or a `Derived` stream
for the few bytes that no file holds (a strided view made contiguous, a deflated record, a checksum). A `Plan` describes
an output before it is written.
"""

from ckptfix.checkpoint.byte_ranges import ByteRange as ByteRange
from ckptfix.checkpoint.byte_ranges import Data as Data
from ckptfix.checkpoint.byte_ranges import Derived as Derived
from ckptfix.checkpoint.byte_ranges import Segment as Segment
from ckptfix.checkpoint.byte_ranges import joined as joined
from ckptfix.checkpoint.byte_ranges import segment_length as segment_length
from ckptfix.checkpoint.checkpoint import Checkpoint as Checkpoint
from ckptfix.checkpoint.checkpoint import FormatState as FormatState
from ckptfix.checkpoint.checkpoint import NameList as NameList
from ckptfix.checkpoint.checkpoint import SiteKind as SiteKind
from ckptfix.checkpoint.checkpoint import StateDict as StateDict
from ckptfix.checkpoint.edits import Drop as Drop
from ckptfix.checkpoint.edits import Edit as Edit
from ckptfix.checkpoint.edits import Put as Put
from ckptfix.checkpoint.edits import Rename as Rename
from ckptfix.checkpoint.edits import SetLocation as SetLocation
from ckptfix.checkpoint.edits import SetMetadata as SetMetadata
from ckptfix.checkpoint.file_version import FileStat as FileStat
from ckptfix.checkpoint.file_version import FileVersion as FileVersion
from ckptfix.checkpoint.plan import OutputFile as OutputFile
from ckptfix.checkpoint.plan import Plan as Plan
from ckptfix.checkpoint.plan import RangeCheck as RangeCheck
from ckptfix.checkpoint.tensors import Storage as Storage
from ckptfix.checkpoint.tensors import TensorEntry as TensorEntry
from ckptfix.checkpoint.tensors import bytes_of as bytes_of
from ckptfix.checkpoint.tensors import contiguous_stride as contiguous_stride
from ckptfix.checkpoint.tensors import file_of as file_of
from ckptfix.checkpoint.tensors import is_contiguous as is_contiguous
from ckptfix.checkpoint.tensors import reach as reach
from ckptfix.checkpoint.tensors import refuse_unusable as refuse_unusable
from ckptfix.checkpoint.tensors import reshaped as reshaped
from ckptfix.checkpoint.tensors import same_bytes as same_bytes
from ckptfix.checkpoint.tensors import same_place as same_place
from ckptfix.checkpoint.tensors import short_shape as short_shape
from ckptfix.checkpoint.tensors import storages_of as storages_of
from ckptfix.checkpoint.tensors import with_parts as with_parts
