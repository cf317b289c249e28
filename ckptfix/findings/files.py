"""Findings about files: what kind of file it is, and whether its container is intact."""

from __future__ import annotations

from ckptfix.findings.folders import FOLDERS
from ckptfix.findings.load_errors import LoadError as E
from ckptfix.findings.row import FindingKind
from ckptfix.findings.steps import step

_REPAIR = step("repair")
_AGAIN = "copy or download it again, and compare its size with the source"

CONTAINERS: tuple[FindingKind, ...] = (
    FindingKind(
        "lfs-pointer", "error", "a git-lfs pointer, not the file itself",
        "The repository was cloned without git-lfs, or a raw link was saved: the file is three lines of text "
        "that name the real file by its sha256 and size. torch says `invalid load key, 'v'` or `Unsupported "
        "operand 118`, safetensors `HeaderTooLarge`. The file holds none of the weights; run `git lfs pull` in "
        "the clone to fetch them.",
        (E.LFS_POINTER, E.NOT_SAFETENSORS, E.TRIED_TENSORFLOW), "git lfs pull",
    ),
    FindingKind(
        "web-page", "error", "a web page or a server's message, not the file",
        "The download saved a page about the file: a login, a virus-scan notice, an error of the server. torch "
        "says `invalid load key, '<'` or `Unsupported operand 60`. No part of the "
        "checkpoint is in the file; use its direct link, and log in if the server asks for that.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "download it again from its direct (raw) link",
    ),
    FindingKind(
        "json-file", "error", "a JSON file, not a checkpoint",
        "A server's answer or a configuration file was saved in place of the weights. torch says `invalid load "
        "key, '{'` or `Unsupported operand 123`.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "download it again, or pass the file that holds the weights",
    ),
    FindingKind(
        "text-file", "error", "a text file, not a checkpoint",
        "The file is readable text: a message, a list, a script. There are no weights in it.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "download it again, or pass the file that holds the weights",
    ),
    FindingKind(
        "compressed", "error", "compressed as a whole",
        "gzip, bzip2, xz, zstd or lz4 was applied to the whole checkpoint, by hand or by a server. torch says "
        "`invalid load key, '\\x1f'` or `Unsupported operand 31`. All data is intact under the compression.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), _REPAIR,
    ),
    FindingKind(
        "zero-filled", "error", "filled with zero bytes",
        "The space was reserved and the bytes never arrived: a download or a copy stopped, or the machine "
        "crashed before the disk was written. The bytes that are zero are lost. torch mentions a legacy .tar "
        "format, or says `invalid load key, '\\x00'`.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW, E.TAKEN_FOR_TAR), _AGAIN,
    ),
    FindingKind(
        "empty-file", "error", "an empty file",
        "The save or the download wrote nothing: the disk was full, or the program was stopped. torch says "
        "`EOFError: Ran out of input`. The file has nothing to recover; use an older checkpoint.",
        (E.EMPTY,), "save or download it again, or use an older checkpoint: there is nothing in it to recover",
    ),
    FindingKind(
        "gguf-file", "error", "a GGUF or GGML model",
        "llama.cpp uses this format. Most of its tensors are quantized in ways that torch does not support.",
        (E.UNKNOWN_DTYPE,), "read it with the Python package gguf",
    ),
    FindingKind(
        "torchscript", "warning", "a TorchScript program (torch.jit.save), not a state dict",
        "A program with its weights: torch.load refuses it, torch.jit.load runs it. It is not damaged. `ckptfix "
        "extract` reads its weights without running it.",
        (E.TORCHSCRIPT,), step("extract"),
    ),
    FindingKind(
        "exported-program", "warning", "an exported program (.pt2), not a state dict",
        "A graph with its weights, written by torch.export.save. It is not damaged. `ckptfix extract` reads its "
        "weights without running it.",
        (E.TORCHSCRIPT,), step("extract"),
    ),
    FindingKind(
        "torch-tar", "error", "a torch checkpoint from before torch 0.1.10 (a tar archive)",
        "The first format of torch.save. torch reads it only with weights_only=False, which can run code. "
        "ckptfix reads it without running code, and converts it.",
        (E.TAKEN_FOR_TAR,), step("convert", to="zip"),
    ),
    FindingKind(
        "tar-archive", "error", "a tar archive",
        "A tar around a checkpoint, or around something else: torch.save has not written tar archives since "
        "0.1.10, and most files called .pth.tar are not tar archives at all.",
        (E.UNPACKED, E.TAKEN_FOR_TAR), "unpack it first: tar -xf {source}",
    ),
    FindingKind(
        "numpy-file", "error", "NumPy arrays, not a torch checkpoint",
        "A .npy or .npz file. torch.load mistakes a .npz for a damaged zip checkpoint.",
        (E.PACKED_AGAIN,), "read it with numpy.load",
    ),
    FindingKind(
        "other-framework", "error", "a file of a different framework",
        "Keras, TensorFlow, ONNX and others keep their weights in their own formats, which torch does not read.",
        (E.TRIED_TENSORFLOW,), "convert it with that framework",
    ),
    FindingKind(
        "other-archive", "error", "an archive, which may hold a checkpoint",
        "The file must be unpacked before torch can read what is inside.",
        (E.NOT_A_CHECKPOINT, E.PACKED_AGAIN), "unpack it, and pass the checkpoint inside",
    ),
    FindingKind(
        "zip-in-zip", "error", "a zip archive around a checkpoint",
        "The checkpoint is a zip archive itself, and was zipped once more. torch looks for data.pkl in the "
        "outer one and says that the file is not in a subdirectory.",
        (E.PACKED_AGAIN,), _REPAIR,
    ),
    FindingKind(
        "repacked-zip", "error", "a checkpoint that was unpacked and zipped again, with a different layout",
        "torch expects one folder with data.pkl in it, and nothing next to that folder. A zip of the folder's "
        "content, of a folder around it, or with the Finder's __MACOSX files does not load: `not in a "
        "subdirectory`, `hasRecord(\"version\")`.",
        (E.PACKED_AGAIN,), _REPAIR,
    ),
    FindingKind(
        "unzipped-folder", "error", "a folder: a torch checkpoint that was unzipped",
        "A browser or a user unpacked the file, because .pth is a zip. torch says `persistent id instruction` "
        "when data.pkl is loaded by itself, and `is a directory` for the folder. All data is intact.",
        (E.PICKLE_LOAD, E.UNPACKED), _REPAIR,
    ),
    FindingKind(
        "bare-data-pkl", "error", "the data.pkl of an unzipped checkpoint, without its tensors' data",
        "It is one record of a torch zip. The bytes of the tensors are in the folder data next to it; unpicklers "
        "say `persistent id instruction was encountered`.",
        (E.PICKLE_LOAD,), "pass its folder instead of data.pkl: ckptfix doctor then shows how to make one file of it",
    ),
    FindingKind(
        "plain-pickle", "error", "a plain pickle, not written by torch.save",
        "pickle.dump or joblib wrote it. torch.load says `Invalid magic number`, or mentions an opcode. A plain "
        "pickle can run code when it is loaded. If it holds tensors, ckptfix reads them without loading it, and "
        "`ckptfix convert` writes the file that torch.save would have written.",
        (E.PICKLE_DUMP,), "if you trust it, load it with pickle.load and save it again with torch.save",
    ),
    FindingKind(
        "unknown-format", "error", "a format that ckptfix does not know",
        "The first bytes match no checkpoint format, archive or web page that ckptfix knows.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "check where it comes from, and download it again",
    ),
    FindingKind(
        "no-checkpoint", "error", "a folder without a checkpoint",
        "None of the files in the folder is a checkpoint or the index of one.",
        (), "pass the path of a file",
    ),
    FindingKind(
        "wrong-suffix", "warning", "its suffix suggests a different format than its content",
        "Loaders choose by the suffix: a torch file called .safetensors gives `HeaderTooLarge`, a safetensors "
        "file called .bin or .pth gives an unpickling error. Rename the file, or convert it to the format of "
        "its suffix.",
        (E.NOT_A_CHECKPOINT, E.NOT_SAFETENSORS),
    ),
    FindingKind(
        "truncated", "error", "the file is cut short",
        "A download, a copy or a save stopped early: the disk was full, a signal arrived, the connection was "
        "lost. torch says `failed finding central directory`, `unexpected EOF`, `Invalid argument` or `negative "
        "seek value`; safetensors says `MetadataIncompleteBuffer`. Everything before the cut is intact and can "
        "be recovered.",
        (E.NO_DIRECTORY, E.TRIED_TENSORFLOW, E.LEGACY_CUT, E.DISK_FULL, E.DATA_LENGTH), _REPAIR,
    ),
    FindingKind(
        "text-mode", "error", "every line feed became a carriage return and a line feed: transferred as text",
        "An FTP client or a version control system mistook the file for text. Each byte 0x0a became two.",
        (E.NO_DIRECTORY, E.BAD_RECORD), _REPAIR,
    ),
    FindingKind(
        "trailing-bytes", "warning", "bytes follow the end of the checkpoint",
        "Something was appended: a signature, a second download, the rest of a larger file that was "
        "overwritten. torch tolerates a few such bytes, and says `failed finding central directory` for more; "
        "safetensors says `MetadataIncompleteBuffer` for any.",
        (E.NO_DIRECTORY, E.DATA_LENGTH), _REPAIR,
    ),
    FindingKind(
        "junk-before", "error", "other bytes come before the checkpoint",
        "The file begins with a header from a server, or with a program that unpacks itself. torch mistakes the "
        "file for its old format and mentions an unsupported operand.",
        (E.NO_DIRECTORY, E.NOT_A_CHECKPOINT, E.BAD_RECORD), _REPAIR,
    ),
    FindingKind(
        "bad-directory", "error", "the zip directory or the header contradicts itself",
        "The list of the file's records is damaged, was written by a different program, or belongs to a "
        "different file. The records themselves may be intact.",
        (E.NO_DIRECTORY, E.NOT_SAFETENSORS, E.BAD_RECORD, E.ZIP_PROGRAM), _REPAIR,
    ),
    FindingKind(
        "bad-local-header", "error", "a record's own header disagrees with the directory",
        "A zip describes each record twice. If the two disagree, the file is damaged, or was made so that two "
        "readers see two different files (CVE-2025-1944). torch says `invalid header or archive is corrupted`.",
        (E.STORAGE_SIZE, E.BAD_RECORD, E.ZIP_PROGRAM), _REPAIR,
    ),
    FindingKind(
        "bad-crc", "error", "the bytes do not match their CRC-32",
        "A bit flipped on a disk, in memory or on the network. torch never checks the checksums, and loads the "
        "wrong value without any error.",
        (E.BAD_RECORD, E.WRONG_VALUES), _REPAIR,
    ),
    FindingKind(
        "no-checksums", "info", "it has no checksums: damage to its tensors cannot be detected",
        "torch.serialization.set_crc32_options(False) writes zeros in their place; safetensors and torch's old "
        "format never have any.",
        (E.WRONG_VALUES,),
    ),
    FindingKind(
        "duplicate-record", "error", "several records have this name",
        "Libraries disagree on which copy to read: torch reads the first, others the last.",
        (), _REPAIR,
    ),
    FindingKind(
        "case-variant", "warning", "records differ only in upper and lower case",
        "torch ignores case when it looks for records, and other readers do not: they may read different "
        "records.",
        (), _REPAIR,
    ),
    FindingKind(
        "odd-name", "warning", "a record's name points outside the folder that it would be unpacked to",
        "Absolute names, `..`, backslashes and NUL bytes do not belong in a checkpoint. ckptfix never unpacks by name.",
        (), _REPAIR,
    ),
    FindingKind(
        "hidden-bytes", "warning", "bytes that belong to no record",
        "The directory does not list these bytes between the records: they remain from an edit, or something is "
        "hidden in them.",
        (), _REPAIR,
    ),
    FindingKind(
        "hidden-pickle", "error", "a record holds a pickle that torch does not load",
        "torch never reads a second pickle next to data.pkl, but other code may. This one contains functions. "
        "`ckptfix sanitize` writes a copy without it.",
        (), None,
    ),
    FindingKind(
        "edited-in-place", "info", "in-place edits can be undone",
        "The bytes that `--in-place` replaced are still there: behind the records of a zip, or, for other "
        "formats, in a file next to the checkpoint. `ckptfix undo` undoes the last edit; `ckptfix slim` writes a "
        "copy without the old bytes.",
    ),
    FindingKind(
        "stray-record", "info", "a record that torch does not write",
        "Something was put into the archive; torch ignores it.",
    ),
    FindingKind(
        "encrypted-record", "error", "a record is marked as encrypted",
        "torch encrypts nothing. Scanners skip records with this mark, and torch ignores the mark (CVE-2025-1945). "
        "Somebody may have hidden the records on purpose: get the file from a source that you trust.",
    ),
    FindingKind(
        "unknown-compression", "error", "a record is compressed in a way that torch does not read",
        "torch stores its records uncompressed; it also reads deflate, and nothing else.",
        (E.BAD_RECORD,), _REPAIR,
    ),
    FindingKind(
        "deflated", "warning", "records are compressed: torch cannot map them into memory",
        "A program zipped the checkpoint again. torch.load reads it slowly, and cannot use mmap=True.",
        (E.NO_MMAP,), _REPAIR,
    ),
    FindingKind(
        "deflate-bomb", "error", "a record would inflate to far more bytes than any tensor data does",
        "Deflate shrinks zeros a thousandfold, so a small file can exhaust the memory. ckptfix did not inflate "
        "the record. Do not load the file; get it again from a source that you trust.",
    ),
    FindingKind(
        "misaligned-storage", "info", "tensor data does not begin at a multiple of 64 bytes",
        "torch aligns it. The file loads anyway, a little more slowly when it is mapped.",
        (E.NO_MMAP,),
    ),
    FindingKind(
        "misaligned-data", "warning", "the tensor data does not begin at a multiple of 8 bytes",
        "safetensors pads its header so that the data is aligned; some readers refuse unaligned data.",
        (E.DATA_LENGTH,), _REPAIR,
    ),
    FindingKind(
        "no-version", "error", "the archive has no version record",
        "torch looks for it and stops: `hasRecord(\"version\")`.",
        (E.PACKED_AGAIN,), _REPAIR,
    ),
    FindingKind(
        "damaged", "error", "the file contradicts itself",
        "A part of it is invalid; the message names the place.",
        (E.NO_DIRECTORY, E.BAD_RECORD), _REPAIR,
    ),
    FindingKind(
        "unsupported", "error", "ckptfix does not read this kind of file, though it may be valid",
        "The message names the reason, and its hint the way around it, if there is one.",
        (E.ARCHIVE_TOO_NEW,),
    ),
    FindingKind(
        "hole", "error", "bytes of a safetensors file that belong to no tensor",
        "safetensors' own reader refuses a file with holes: `InvalidOffset` or `MetadataIncompleteBuffer`.",
        (E.DATA_LENGTH,), step("repair"),
    ),
    FindingKind(
        "overlap", "error", "two tensors of a safetensors file overlap",
        "The safetensors library refuses it; nothing shows which tensor the bytes belong to. `ckptfix repair` "
        "gives each tensor its own copy of them.",
        (E.DATA_LENGTH,), None,
    ),
    FindingKind("leading-bytes", "warning", "white space or a mark before a safetensors header",
          "The format begins with an opening brace; some readers refuse other bytes. Converting the file to zip "
          "and back writes a clean header.", (E.NOT_SAFETENSORS,)),
    FindingKind("nul-padding", "error", "a safetensors header padded with NUL bytes",
          "The format pads with spaces, and its reader refuses NUL. Converting the file to zip and back writes a "
          "clean header.", (E.NOT_SAFETENSORS,)),
    FindingKind("duplicate-key", "error", "a key occurs twice in a safetensors header",
          "Libraries disagree on which copy to load, and nothing shows which one is right: save the file again.", ()),
    FindingKind("unknown-field", "warning", "a safetensors header with a field that no reader knows",
          "The format has three fields for a tensor: dtype, shape, data_offsets. Converting the file to zip and "
          "back writes only these.", ()),
    *FOLDERS,
)  # fmt: skip
