"""Findings about files: what they are, and whether the container holds what it promises."""

from __future__ import annotations

from ckptfix.findings.folders import FOLDERS
from ckptfix.findings.load_errors import LoadError as E
from ckptfix.findings.row import Entry

_REPAIR = "ckptfix repair {source} {repaired}"
_AGAIN = "copy or download it again, and compare its size with the source"

CONTAINERS: tuple[Entry, ...] = (
    Entry(
        "lfs-pointer", "error", "a git-lfs pointer, not the file itself",
        "The repository was cloned without git-lfs, or a page's raw link was saved: the file is three lines of text "
        "that "
        "name the real one by its sha256 and size. torch says `invalid load key, 'v'` or `Unsupported operand 118`, "
        "safetensors `HeaderTooLarge`. None of the weights are here; `git lfs pull` in the clone brings them.",
        (E.LFS_POINTER, E.NOT_SAFETENSORS, E.TRIED_TENSORFLOW), "git lfs pull",
    ),
    Entry(
        "web-page", "error", "a web page or a server's message, not the file",
        "The download saved a page about the file: a login, a virus-scan notice, an error of the store. torch says "
        "`invalid "
        "load key, '<'` or `Unsupported operand 60`. Nothing of the file is here; use its direct link, with a login.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "download it again from its direct (raw) link",
    ),
    Entry(
        "json-file", "error", "a JSON file, not a checkpoint",
        "A server's answer or a configuration file stands where the weights should be. torch says `invalid load key, "
        "'{'` or `Unsupported operand 123`.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "download it again, or pass the file that holds the weights",
    ),
    Entry(
        "text-file", "error", "a text file, not a checkpoint",
        "The file is readable text: a message, a list, a script. There are no weights in it.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "download it again, or pass the file that holds the weights",
    ),
    Entry(
        "compressed", "error", "compressed as a whole",
        "gzip, bzip2, xz or zstd was put around the checkpoint, by hand or by a server. torch says `invalid load key, "
        "'\\x1f'` or `Unsupported operand 31`. All data is there, under the compression.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), _REPAIR,
    ),
    Entry(
        "zero-filled", "error", "filled with zero bytes",
        "The space was reserved and the bytes never arrived: a download or a copy that stopped, or a crash before "
        "the disk was written. What is zero is lost. torch speaks of a legacy .tar format, or of `invalid load key, "
        "'\\x00'`.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW, E.TAKEN_FOR_TAR), _AGAIN,
    ),
    Entry(
        "empty-file", "error", "an empty file",
        "The save or the download wrote nothing: a full disk, a stopped program. torch says `EOFError: Ran out of "
        "input`. "
        "Nothing can be saved from it; take an older checkpoint.",
        (E.EMPTY,), "save or download it again, or take an older checkpoint: there is nothing in it to save",
    ),
    Entry(
        "gguf-file", "error", "a GGUF or GGML model",
        "A file of llama.cpp. Its tensors are mostly quantised in ways that torch does not know.",
        (E.UNKNOWN_DTYPE,), "the Python package gguf reads it",
    ),
    Entry(
        "torchscript", "warning", "a TorchScript program (torch.jit.save), not a state dict",
        "A program with its weights, which torch.load refuses and torch.jit.load runs. It is not damaged. Its weights "
        "can be taken out without running it.",
        (E.TORCHSCRIPT,), "ckptfix extract {source} {weights}",
    ),
    Entry(
        "exported-program", "warning", "an exported program (.pt2), not a state dict",
        "What torch.export.save writes: a graph with its weights. It is not damaged. Its weights can be taken out "
        "without running it.",
        (E.TORCHSCRIPT,), "ckptfix extract {source} {weights}",
    ),
    Entry(
        "torch-tar", "error", "a torch checkpoint from before torch 0.1.10 (a tar archive)",
        "The first format of torch.save. torch reads it only with weights_only=False, which can run code. It is read "
        "without that, and converted.",
        (E.TAKEN_FOR_TAR,), "ckptfix convert {source} {zip} --to zip",
    ),
    Entry(
        "tar-archive", "error", "a tar archive",
        "A tar around a checkpoint, or around something else: torch.save has written none since 0.1.10, and files "
        "called "
        ".pth.tar are mostly not tar archives at all.",
        (E.UNPACKED, E.TAKEN_FOR_TAR), "unpack it first: tar -xf {source}",
    ),
    Entry(
        "numpy-file", "error", "NumPy arrays, not a torch checkpoint",
        "A .npy or .npz file. torch.load takes a .npz for a damaged zip checkpoint.",
        (E.PACKED_AGAIN,), "numpy.load reads it",
    ),
    Entry(
        "other-framework", "error", "a file of another framework",
        "Keras, TensorFlow, ONNX and others keep their weights in their own formats, which torch does not read.",
        (E.TRIED_TENSORFLOW,), "convert it with that framework",
    ),
    Entry(
        "other-archive", "error", "an archive, which may hold a checkpoint",
        "The file has to be unpacked before torch can read what is inside.",
        (E.NOT_A_CHECKPOINT, E.PACKED_AGAIN), "unpack it, and pass the checkpoint that it holds",
    ),
    Entry(
        "zip-in-zip", "error", "a zip archive around a checkpoint",
        "The checkpoint was zipped, and it is a zip archive itself. torch looks for data.pkl in the outer one "
        "and says "
        "that the file is not in a subdirectory.",
        (E.PACKED_AGAIN,), _REPAIR,
    ),
    Entry(
        "repacked-zip", "error", "a checkpoint that was unpacked and zipped again, in another layout",
        "torch expects one folder with data.pkl in it, and nothing beside. A zip of the folder's content, of a "
        "folder around "
        "it, or with the Finder's __MACOSX files does not load: `not in a subdirectory`, `hasRecord(\"version\")`.",
        (E.PACKED_AGAIN,), _REPAIR,
    ),
    Entry(
        "unzipped-folder", "error", "a folder: a torch checkpoint that was unzipped",
        "A browser or a user unpacked the file, as .pth is a zip. torch says `persistent id instruction` when "
        "data.pkl "
        "is loaded by itself, and `is a directory` for the folder. All data is there.",
        (E.PICKLE_LOAD, E.UNPACKED), _REPAIR,
    ),
    Entry(
        "bare-data-pkl", "error", "the data.pkl of an unzipped checkpoint, without its tensors' data",
        "It is one record of a torch zip. The tensors' bytes are in the folder data beside it; unpicklers say "
        "`persistent id instruction was encountered`.",
        (E.PICKLE_LOAD,), "pass its folder in place of data.pkl: ckptfix doctor then says how to make one file of it",
    ),
    Entry(
        "plain-pickle", "error", "a plain pickle, not written by torch.save",
        "pickle.dump or joblib wrote it. torch.load says `Invalid magic number`, or mentions an opcode. A plain pickle "
        "can run code when it is loaded. Where it holds tensors, they are read without loading it, and `ckptfix "
        "convert` writes what torch.save would have written.",
        (E.PICKLE_DUMP,), "if you trust it, load it with pickle.load and save it again with torch.save",
    ),
    Entry(
        "unknown-format", "error", "no format that ckptfix knows",
        "The first bytes belong to no checkpoint format, archive or page that is known.",
        (E.NOT_A_CHECKPOINT, E.TRIED_TENSORFLOW), "look where it comes from, and download it again",
    ),
    Entry(
        "no-checkpoint", "error", "a folder without a checkpoint",
        "None of the files in the folder is a checkpoint or the index of one.",
        (), "name a file",
    ),
    Entry(
        "wrong-suffix", "warning", "its suffix suggests another format than its content",
        "Loaders choose by the suffix: a torch file called .safetensors gives `HeaderTooLarge`, a safetensors file "
        "called "
        ".bin or .pth an unpickling error.",
        (E.NOT_A_CHECKPOINT, E.NOT_SAFETENSORS),
    ),
    Entry(
        "truncated", "error", "the file ends before what it promises",
        "A download, a copy or a save was cut short: a full disk, a signal, a lost connection. torch says `failed "
        "finding "
        "central directory`, `unexpected EOF`, `Invalid argument` or `negative seek value`; safetensors says "
        "`MetadataIncompleteBuffer`. What was written before the cut is intact and can be recovered.",
        (E.NO_DIRECTORY, E.TRIED_TENSORFLOW, E.LEGACY_CUT, E.DISK_FULL, E.DATA_LENGTH), _REPAIR,
    ),
    Entry(
        "text-mode", "error", "every line feed is a carriage return and a line feed: transferred as text",
        "An FTP client or a version control system took the file for text. Each byte 0x0a became two.",
        (E.NO_DIRECTORY, E.BAD_RECORD), _REPAIR,
    ),
    Entry(
        "trailing-bytes", "warning", "bytes follow the end of the checkpoint",
        "Something was appended: a signature, a second download, the rest of a larger file that was overwritten. torch "
        "tolerates a little of it, and then says `failed finding central directory`; safetensors says "
        "`MetadataIncompleteBuffer` for any.",
        (E.NO_DIRECTORY, E.DATA_LENGTH), _REPAIR,
    ),
    Entry(
        "junk-before", "error", "other bytes stand before the checkpoint",
        "A header of a server, or of a program that unpacks itself, stands first. torch takes the file for its old "
        "format and "
        "speaks of an unsupported operand.",
        (E.NO_DIRECTORY, E.NOT_A_CHECKPOINT, E.BAD_RECORD), _REPAIR,
    ),
    Entry(
        "bad-directory", "error", "the zip directory or the header contradicts itself",
        "The list of what stands where is damaged, was written by another program, or is of another file. The records "
        "themselves may be intact.",
        (E.NO_DIRECTORY, E.NOT_SAFETENSORS, E.BAD_RECORD, E.ZIP_PROGRAM), _REPAIR,
    ),
    Entry(
        "bad-local-header", "error", "a record's own header says other than the directory",
        "Each record of a zip is described twice. Where the two disagree, the file is damaged, or two readers are "
        "meant to see "
        "two files (CVE-2025-1944). torch says `invalid header or archive is corrupted`.",
        (E.STORAGE_SIZE, E.BAD_RECORD, E.ZIP_PROGRAM), _REPAIR,
    ),
    Entry(
        "bad-crc", "error", "the bytes do not match their CRC-32",
        "A bit flipped on a disk, in memory or on the way. torch never looks at the checksums and loads the wrong "
        "value without any error.",
        (E.BAD_RECORD, E.WRONG_VALUES), _REPAIR,
    ),
    Entry(
        "no-checksums", "info", "it states no checksums: damage to its tensors could not be seen",
        "torch.serialization.set_crc32_options(False) writes zeros in their place; safetensors and torch's old "
        "format never "
        "have any.",
        (E.WRONG_VALUES,),
    ),
    Entry(
        "duplicate-record", "error", "several records have this name",
        "Libraries disagree on which copy to read: torch takes the first, others the last.",
        (), _REPAIR,
    ),
    Entry(
        "case-variant", "warning", "records differ only in upper and lower case",
        "torch finds records without regard to case, other readers do not: each sees another file.",
        (), _REPAIR,
    ),
    Entry(
        "odd-name", "warning", "a record's name would lead out of the folder it is unpacked to",
        "Absolute names, `..`, backslashes and NUL bytes do not belong in a checkpoint. ckptfix never unpacks by name.",
        (), _REPAIR,
    ),
    Entry(
        "hidden-bytes", "warning", "bytes that no record accounts for",
        "Between the records stand bytes that the directory does not list: the rest of an edit, or something hidden.",
        (), _REPAIR,
    ),
    Entry(
        "hidden-pickle", "error", "a pickle that torch does not load stands in a record",
        "torch never reads a second pickle beside data.pkl, but other code may. This one contains functions.",
        (), None,
    ),
    Entry(
        "edited-in-place", "info", "edits in place can be taken back",
        "What `--in-place` replaced is still there: in a zip behind the records, for other formats in a file beside. "
        "`ckptfix undo` takes the last edit back; `ckptfix slim` writes a copy without it.",
    ),
    Entry(
        "stray-record", "info", "a record that torch does not write",
        "Something was put into the archive; torch ignores it.",
    ),
    Entry(
        "encrypted-record", "error", "a record is marked as encrypted",
        "torch encrypts nothing. Scanners skip records with this mark, and torch ignores the mark (CVE-2025-1945).",
    ),
    Entry(
        "unknown-compression", "error", "a record is compressed in a way that torch does not read",
        "torch stores its records; it reads deflate too, and nothing else.",
        (E.BAD_RECORD,), _REPAIR,
    ),
    Entry(
        "deflated", "warning", "records are compressed: torch cannot map them into memory",
        "A program zipped the checkpoint again. torch.load reads it slowly, and not with mmap=True.",
        (E.NO_MMAP,), _REPAIR,
    ),
    Entry(
        "deflate-bomb", "error", "a record would unfold to far more bytes than any tensor data does",
        "Deflate shrinks zeros a thousandfold: a small file can fill a memory. The record was not unfolded.",
    ),
    Entry(
        "misaligned-storage", "info", "tensor data begins at no multiple of 64 bytes",
        "torch aligns it. It loads as it is, mapped a little more slowly.",
        (E.NO_MMAP,),
    ),
    Entry(
        "misaligned-data", "warning", "the tensor data begins at no multiple of 8 bytes",
        "safetensors pads its header so that the data is aligned; some readers refuse what is not.",
        (E.DATA_LENGTH,), "ckptfix convert {source} {zip} --to zip",
    ),
    Entry(
        "no-version", "error", "the archive has no version record",
        "torch asks for it and stops: `hasRecord(\"version\")`.",
        (E.PACKED_AGAIN,), _REPAIR,
    ),
    Entry(
        "damaged", "error", "the file contradicts itself",
        "A part of it is not what it must be; the message says where.",
        (E.NO_DIRECTORY, E.BAD_RECORD), _REPAIR,
    ),
    Entry(
        "unsupported", "error", "valid, or nearly so, and not read by ckptfix",
        "The message says what it is.",
        (E.ARCHIVE_TOO_NEW,),
    ),
    Entry(
        "hole", "error", "bytes of a safetensors file that belong to no tensor",
        "safetensors' own reader refuses a file with holes: `InvalidOffset` or `MetadataIncompleteBuffer`.",
        (E.DATA_LENGTH,), "ckptfix convert {source} {zip} --to zip",
    ),
    Entry(
        "overlap", "error", "two tensors of a safetensors file overlap",
        "The safetensors library refuses it; it is not known which tensor the bytes belong to.",
        (E.DATA_LENGTH,), None,
    ),
    Entry("leading-bytes", "warning", "white space or a mark before a safetensors header",
          "The format begins with an opening brace; some readers refuse other bytes.", (E.NOT_SAFETENSORS,)),
    Entry("nul-padding", "error", "a safetensors header padded with NUL bytes",
          "The format pads with spaces, and its reader refuses NUL.", (E.NOT_SAFETENSORS,)),
    Entry("duplicate-key", "error", "a key occurs twice in a safetensors header",
          "Libraries disagree on which copy to load.", ()),
    Entry("unknown-field", "warning", "a safetensors header with a field that no reader knows",
          "The format has three fields for a tensor: dtype, shape, data_offsets.", ()),
    *FOLDERS,
)  # fmt: skip
