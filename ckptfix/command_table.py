"""The one table of commands: what each is called, what it does, and what others need to know of it.

A row is plain data. The command line, its completion and its help, the names of outputs, the commands that findings
propose, `fix`, fleets and the public names of the package all read this table, so that a new command is one row here.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import NamedTuple


class Chained(NamedTuple):
    """The place of a command in a chain: the commands that `fix` runs, and that findings propose.

    Attributes:
        place: commands with a lower number come first.
        spares: commands that have nothing left to do after it.
        flattens: the output is the state dict itself, so that addresses of the input no longer apply.
        edits: it writes the format that it reads, and therefore refuses a read-only format.
        keys: it works on the keys of a state dict, which a pickled module does not have.
    """

    place: int
    spares: tuple[str, ...] = ()
    flattens: bool = False
    edits: bool = True
    keys: bool = False


class Command(NamedTuple):
    """A command.

    Attributes:
        name: the word that a user types.
        section: the heading in the overview.
        behind: the overview names it without a line of its own.
        output_option: the option before the name of its output; empty for a second argument.
        summary: one line for the overview, the completion and the help.
        example: a command line for the end of its help.
        examples: more of them.
        home: the module below ``ckptfix`` that holds its function in Python, which has the same name with underscores;
            empty if there is none.
        cli: the module below ``ckptfix.cli`` that holds its ``command``; empty if it is named after the command.
        writes: it writes an output, as ``NAME IN [OUT]``.
        word: the word in the default name of its output: ``"stripped"`` makes ``x.stripped.pth`` of ``x.pth``; empty
            for the name of the command.
        in_place: it has ``--in-place``.
        at: it has ``--at``.
        not_in_a_fleet: why it makes no sense for one file of many; empty if it does.
        other_words: words that users may know from other tools. Where several commands have the same word, the one
            that has it nearer to the front is proposed first.
        other_options: options that users may know from other tools -> what this command has instead.
        chained: its place in a chain; None if no finding proposes it.
    """

    name: str
    section: str
    summary: str
    example: str
    home: str = ""
    cli: str = ""
    writes: bool = False
    word: str = ""
    in_place: bool = False
    at: bool = False
    not_in_a_fleet: str = ""
    other_words: tuple[str, ...] = ()
    other_options: tuple[tuple[str, str], ...] = ()
    chained: Chained | None = None
    examples: tuple[str, ...] = ()
    behind: bool = False
    output_option: str = ""

    @property
    def module(self) -> str:
        """The module of its ``command``, below ``ckptfix.cli``."""
        return self.cli or self.function

    @property
    def function(self) -> str:
        """The name of its function in Python."""
        return self.name.replace("-", "_").replace(" ", "_")

    @property
    def all_examples(self) -> tuple[str, ...]:
        """The command lines for the end of its help."""
        return (self.example, *self.examples)

    @property
    def output_word(self) -> str:
        """The word in the default name of its output."""
        return self.word or self.name


_TABLE = (
    Command(
        "fix", "Start", "Fix everything that keeps a file from loading, in one step.",
        example="ckptfix fix broken.pth fixed.pth", home="ops.fix", writes=True, word="fixed", in_place=True, at=True,
        examples=(
            "ckptfix fix training.ckpt plain.ckpt --like model.safetensors",
        ),
    ),
    Command(
        "ls", "Start", "List checkpoints with format, size, devices and faults.",
        example="ckptfix ls runs/ --recursive --sort size",
        not_in_a_fleet="it makes one list of all inputs: `ckptfix ls -r FOLDER`",
        other_words=("list", "dir", "find"),
        examples=(
            "ckptfix ls run/ --check",
        ),
    ),
    Command(
        "inspect", "Look", "Show what a file is, and list its tensors.",
        example="ckptfix inspect model.pth --filter '*.weight' --sort size", home="ops.inspect",
        other_words=("info", "show", "report", "html", "page", "view", "cat", "load", "read", "open", "summary"),
        examples=(
            "ckptfix inspect model.pth --tree --depth 2",
            "ckptfix inspect model.safetensors --html page.html",
        ),
    ),
    Command(
        "doctor", "Start", "Explain why a file does not load, and what fixes it.",
        example="ckptfix doctor model.pth --error 'failed finding central directory'", home="ops.doctor", at=True,
        other_words=("verify", "check", "validate", "diagnose", "why", "scan", "report", "html", "page"),
        examples=(
            "ckptfix doctor model.pth --like other.pth",
            "ckptfix doctor run/",
        ),
        other_options=(
            ("--message", "--error TEXT"),
            ("--traceback", "--error @FILE"),
            ("--model", "--like TARGET"),
        ),
    ),
    Command(
        "browse", "Look", "Browse a file, a folder or two files in the terminal.",
        example="ckptfix browse model.pth", at=True, not_in_a_fleet="it is an interactive screen",
        other_words=("tui", "ui", "explore", "explorer", "tree", "less"),
        examples=(
            "ckptfix browse before.pth after.pth",
        ),
    ),
    Command(
        "diff", "Look", "Compare two checkpoints: keys, shapes, devices, values.",
        example="ckptfix diff before.pth after.safetensors --atol 1e-6", home="ops.diff", at=True,
        other_words=("report", "html", "page", "compare", "cmp"),
        examples=(
            "ckptfix diff before.pth after.pth --sort change --by-layer",
            "ckptfix diff before.pth after.pth --html page.html",
        ),
    ),
    Command(
        "digest", "Look", "Hash each tensor; check a copy against its original.",
        example="ckptfix digest model.safetensors --check original.pth", home="ops.digest", cli="values.digest",
        at=True, other_words=("hash", "sha256sum", "checksum", "manifest", "verify"),
        examples=(
            "ckptfix digest model.pth > model.digest",
        ),
        behind=True,
    ),
    Command(
        "stats", "Look", "Show min, max, mean, std and NaN count per tensor.",
        example="ckptfix stats model.safetensors --by-layer", home="ops.stats", cli="values.stats", at=True,
        other_words=("stat", "histogram", "nan", "norms"),
        examples=(
            "ckptfix stats model.pth --filter '*.weight'",
        ),
    ),
    Command(
        "strip-module", "Change", "Remove the prefix that DataParallel or DDP adds to the keys.",
        example="ckptfix strip-module ddp.pth plain.pth", home="ops.rename", writes=True, word="stripped",
        in_place=True, at=True, other_words=("strip", "unwrap-ddp"), chained=Chained(60, keys=True),
        examples=(
            "ckptfix strip-module ddp.pth --in-place",
            "ckptfix strip-module lit.ckpt plain.ckpt --prefix model.",
        ),
        other_options=(
            ("--strip-prefix", "--prefix P"),
            ("--key-prefix", "--prefix P"),
        ),
    ),
    Command(
        "add-module", "Change", "Add that prefix, for a wrapped model.",
        example="ckptfix add-module plain.pth ddp.pth", home="ops.rename", writes=True, word="wrapped",
        in_place=True, at=True, chained=Chained(70, keys=True),
        examples=(
            "ckptfix add-module plain.pth --in-place",
        ),
    ),
    Command(
        "unwrap", "Change", "Remove the prefixes of all known wrappers: DDP, FSDP, compile.",
        example="ckptfix unwrap fsdp_compiled.pt plain.pt", home="ops.rename", writes=True, word="unwrapped",
        in_place=True, at=True, other_words=("strip", "unwrap-ddp"),
        chained=Chained(50, spares=("strip-module",), keys=True),
        examples=(
            "ckptfix unwrap fsdp_compiled.pt --in-place",
        ),
        behind=True,
    ),
    Command(
        "rename", "Change", "Rename keys by regular expressions or a file of rules.",
        example=r"ckptfix rename old.pth new.pth --sub '^backbone\.=' --sub 'gamma$=weight'",
        home="ops.rename", writes=True, word="renamed", in_place=True, at=True,
        other_words=("remap", "map-keys", "replace", "sed", "sub"), chained=Chained(80, keys=True),
        examples=(
            "ckptfix rename old.pth new.pth --map rules.txt",
        ),
        other_options=(
            ("--regex", "--sub 'REGEX=NEW'"),
            ("--replace", "--sub 'OLD=NEW'"),
            ("--rules", "--map FILE"),
        ),
    ),
    Command(
        "match", "Change", "Rename keys to fit another model.",
        example="ckptfix match vgg19.pth mine.pth --like my_vgg.pth --report",
        home="ops.match", writes=True, word="matched", in_place=True, at=True, chained=Chained(90, keys=True),
        examples=(
            "ckptfix match vgg19.pth mine.pth --like my_vgg.pth --drop-unexpected",
        ),
        other_options=(
            ("--target", "--like TARGET"),
            ("--model", "--like TARGET"),
        ),
    ),
    Command(
        "select", "Change", "Keep or drop tensors by name.",
        example="ckptfix select model.pth encoder.pth --keep 'encoder.*' --drop '*.bias'",
        home="ops.select", cli="values.select", writes=True, word="selected", in_place=True, at=True,
        chained=Chained(95),
        other_words=("prune", "filter", "drop", "keep", "subset"),
        examples=(
            "ckptfix select model.pth headless.pth --drop 'fc.*'",
        ),
        other_options=(
            ("--exclude", "--drop GLOB"),
            ("--include", "--keep GLOB"),
            ("--filter", "--keep GLOB"),
        ),
    ),
    Command(
        "cast", "Change", "Convert tensors to fp16, bf16, fp8 ...",
        example="ckptfix cast model.safetensors half.safetensors --to bfloat16 --keep '*norm*'",
        home="ops.cast", cli="values.cast", writes=True, word="cast", in_place=True, at=True,
        other_words=(
            "half", "bf16", "fp16", "float16", "bfloat16", "fp8", "to-fp16", "to-bf16", "quantize", "dtype",
            "to",
        ),
        examples=(
            "ckptfix cast model.pth model16.pth --to fp16",
        ),
        other_options=(
            ("--dtype", "--to DTYPE"),
            ("--half", "--to fp16"),
            ("--fp16", "--to fp16"),
            ("--bf16", "--to bf16"),
            ("--bfloat16", "--to bf16"),
            ("--fp8", "--to float8_e4m3fn"),
            ("--exclude", "--keep GLOB"),
            ("--include", "--only GLOB"),
        ),
    ),
    Command(
        "average", "Change", "Average several checkpoints.",
        example="ckptfix average epoch_8.pth epoch_9.pth epoch_10.pth -o mean.pth",
        home="ops.average", cli="values.average", writes=True, word="averaged", at=True,
        not_in_a_fleet="it makes one output from several inputs",
        other_words=("avg", "mean", "swa", "ema", "soup"),
        examples=(
            "ckptfix average --last 5 run/ -o mean.pth",
        ),
        behind=True,
    ),
    Command(
        "merge", "Change", "Combine several state dicts into one.",
        example="ckptfix merge encoder.pth decoder.safetensors -o model.pth",
        home="ops.merge", cli="values.merge", writes=True, word="merged", at=True,
        not_in_a_fleet="it makes one output from several inputs",
        behind=True,
    ),
    Command(
        "lora", "Change", "Describe adapters (LoRA), and merge them into their base.",
        example="ckptfix lora merge base/ adapter/ -o merged/",
        not_in_a_fleet="it makes one output from several inputs",
        other_words=("peft", "adapter", "adapters", "dora", "merge-lora", "merge-and-unload", "kohya"),
        examples=(
            "ckptfix lora info adapter_model.safetensors",
        ),
        behind=True,
    ),
    Command(
        "set-metadata", "Change", "Change the metadata of a safetensors file.",
        example="ckptfix set-metadata model.safetensors named.safetensors --set license=apache-2.0",
        home="ops.set_metadata", cli="values.set_metadata", writes=True, word="described", in_place=True,
        chained=Chained(45),
        examples=(
            "ckptfix set-metadata model.safetensors --in-place --set format=pt",
        ),
        behind=True,
    ),
    Command(
        "to-cpu", "Change", "Make every tensor load on the CPU.",
        example="ckptfix to-cpu gpu.pth cpu.pth", home="ops.relocate", writes=True, word="cpu", in_place=True,
        other_words=("cpu", "device"), chained=Chained(100),
        examples=(
            "ckptfix to-cpu gpu.pth --in-place",
        ),
    ),
    Command(
        "map-location", "Change", "Move tensors to another device.",
        example="ckptfix map-location model.pth moved.pth cuda:1",
        home="ops.relocate", writes=True, word="moved", in_place=True,
        other_words=(
            "cpu", "device", "to-cuda", "cuda", "to-gpu", "gpu", "to-mps",
        ),
        examples=(
            "ckptfix map-location model.pth swapped.pth cuda:0=cuda:1 cuda:1=cuda:0",
        ),
        other_options=(
            ("--to", "DEVICE as the last word"),
            ("--device", "DEVICE as the last word"),
            ("--map", "FROM=TO as the last words"),
        ),
    ),
    Command(
        "undo", "Change", "Undo the last in-place edit (--in-place).",
        example="ckptfix undo model.pth", home="ops.undo",
        not_in_a_fleet="the undo journal is beside each file, and a plan must not ask for it",
        other_words=("revert", "rollback", "back"),
        examples=(
            "ckptfix undo model.pth --list",
        ),
    ),
    Command(
        "convert", "Convert and rescue", "Convert between torch zip, torch legacy and safetensors.",
        example="ckptfix convert model.pth model.safetensors", home="ops.deploy", writes=True, word="converted",
        at=True,
        other_words=(
            "join", "consolidate", "export", "save", "shard", "split", "merge-shards", "merge-sharded",
            "to-safetensors",
        ),
        chained=Chained(110, spares=("set-metadata",), flattens=True, edits=False),
        examples=(
            "ckptfix convert zero3_run/ model.safetensors --dtype fp16 --unwrap",
            "ckptfix convert model.pth shards/ --to hf --shard-size 2GB",
        ),
        other_options=(
            ("--format", "--to FORMAT"),
            ("--max-shard-size", "--shard-size SIZE"),
        ),
    ),
    Command(
        "extract", "Convert and rescue", "Extract the weights from a pickled module or a program.",
        example="ckptfix extract whole_model.pth state_dict.pth", home="ops.extract", writes=True, word="weights",
        at=True, chained=Chained(20, spares=("sanitize", "slim"), flattens=True, edits=False),
        examples=(
            "ckptfix extract scripted.pt state_dict.pth",
        ),
        behind=True,
    ),
    Command(
        "sanitize", "Convert and rescue", "Replace what weights_only=True refuses with plain values.",
        example="ckptfix sanitize training.ckpt plain.ckpt", home="ops.sanitize", writes=True, word="plain",
        chained=Chained(30, edits=False),
        behind=True,
    ),
    Command(
        "repair", "Convert and rescue", "Recover the intact tensors of a damaged file.",
        example="ckptfix repair broken.pth fixed.pth", home="ops.repair", writes=True, word="repaired",
        other_words=("recover", "rescue", "restore", "salvage"), chained=Chained(10, edits=False),
        examples=(
            "ckptfix repair broken.pth --check-only",
            "ckptfix repair broken.pth fixed.pth --fill-from older.pth",
        ),
    ),
    Command(
        "slim", "Convert and rescue", "Shrink a file (unused bytes; optimizer with --no-optimizer).",
        example="ckptfix slim training.ckpt small.ckpt --no-optimizer", home="ops.slim", writes=True, word="slim",
        chained=Chained(40),
        behind=True,
    ),
    Command(
        "fleet", "At scale", "Run one command on thousands of checkpoints, resumable.",
        example="ckptfix fleet run plan.jsonl", not_in_a_fleet="it is the fleet itself",
        examples=(
            "ckptfix fleet plan -r runs -- doctor --fast > plan.jsonl",
            "ckptfix fleet status plan.jsonl",
        ),
    ),
    Command(
        "git", "At scale", "Let git show what changed in checkpoints.",
        example="ckptfix git enable", not_in_a_fleet="git runs it",
        other_words=("textconv", "difftool", "gitattributes"),
        examples=(
            "ckptfix git status",
        ),
    ),
    Command(
        "help", "Help", "Show the documentation: recipes, formats, findings ...",
        example="ckptfix help recipes", not_in_a_fleet="it reads no file",
        examples=(
            "ckptfix help resume",
            "ckptfix help strip-module",
        ),
        behind=True,
    ),
    Command(
        "completion", "Help", "Print the completion script of a shell.",
        example="ckptfix completion bash >> ~/.bashrc", not_in_a_fleet="it reads no file",
        examples=(
            "ckptfix completion fish > ~/.config/fish/completions/ckptfix.fish",
        ),
        behind=True,
    ),
)  # fmt: skip

COMMANDS: dict[str, Command] = {row.name: row for row in _TABLE}
"""Name -> row, in the order of the overview."""

_IN_GROUPS = (
    Command(
        "lora convert", "Change", "Write an adapter in the layout of another library.",
        example="ckptfix lora convert style.safetensors style/ --to peft",
        home="ops.lora.convert", writes=True, word="converted", at=True,
        chained=Chained(90, spares=("set-metadata", "strip-module", "rename"), flattens=True, edits=False, keys=True),
    ),
    Command(
        "lora merge", "Change", "Merge adapters into their base.",
        example="ckptfix lora merge base/ adapter/ -o merged/",
        writes=True, word="merged", at=True, output_option="-o",
        chained=Chained(90, keys=True),
    ),
)

STEPS: Mapping[str, Command] = ChainMap(COMMANDS, {row.name: row for row in _IN_GROUPS})
"""The commands that a finding may propose: all of them, and those inside groups."""


def meant_by(word: str) -> list[str]:
    """Return the commands that do what `word` does in other tools, best first."""
    found = [(row.other_words.index(word), row.name) for row in COMMANDS.values() if word in row.other_words]
    return [name for _, name in sorted(found, key=lambda pair: pair[0])]
