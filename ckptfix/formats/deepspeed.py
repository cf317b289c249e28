"""A folder of DeepSpeed's ZeRO, and what makes one file of it.

::

    FOLDER/latest                                            the name of the newest of these:
    FOLDER/global_step3/mp_rank_00_model_states.pt           stages 0 to 2: the module, whole
    FOLDER/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt     stage 3: one rank's, without values
    FOLDER/global_step3/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt
    FOLDER/zero_to_fp32.py                                   put there by stages 1 to 3
    UNIVERSAL/zero/NAME/fp32.pt                              what ds_to_universal.py makes: a file a parameter

Source: deepspeed/runtime/engine.py, deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from pathlib import Path

from ckptfix.commands import quoted

SCRIPT = "zero_to_fp32.py"
STATES = ("_model_states.pt", "_optim_states.pt")


def way_out(path: str) -> tuple[str, bool]:
    """(what makes one file of the checkpoint that the file or folder `path` belongs to, whether it is a command).

    A command runs as it stands from any folder; without the script that DeepSpeed puts there it takes DeepSpeed's own.
    """
    place = Path(path)
    inside = place if place.is_dir() else place.parent
    if (inside / "zero").is_dir():
        words = f"the fp32 values of each parameter are in {quoted(str(inside / 'zero'))}/NAME/fp32.pt"
        return words, False
    whole = _whole_states(inside)
    if whole is not None:
        words = f"`ckptfix extract {quoted(str(whole))} OUT --at module` takes the weights, which are complete there"
        return words, False
    outer = inside.parent if _is_step(inside) else inside
    tag = f" -t {quoted(inside.name)}" if _is_step(inside) and not (outer / "latest").is_file() else ""
    script = outer / SCRIPT
    program = quoted(str(script)) if script.is_file() else "-m deepspeed.utils.zero_to_fp32"
    return f"python {program} {quoted(str(outer))} OUT{tag}", True


def _is_step(folder: Path) -> bool:
    """Whether `folder` holds the files of one save, rather than the folders of several."""
    return any(path for suffix in STATES for path in folder.glob(f"*{suffix}"))


def _whole_states(folder: Path) -> Path | None:
    """The model states of a save without ZeRO, which has no other file."""
    steps = [folder]
    if not _is_step(folder):
        try:
            steps = [folder / (folder / "latest").read_text(errors="replace").strip()[:200]]
        except (OSError, ValueError):
            return None
    found = sorted(steps[0].glob("*_model_states.pt"))
    alone = len(found) == 1 and found[0].name.startswith("mp_rank") and not any(steps[0].glob("*_optim_states.pt"))
    return found[0] if alone else None
