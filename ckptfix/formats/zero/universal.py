"""Universal checkpoints: ds_to_universal.py has already joined each parameter, in a separate folder.

::

    FOLDER/zero/NAME/fp32.pt           {"param": tensor, "cat_dim": ...}; or, from stage 3, the flattened tensor
    FOLDER/zero/NAME/exp_avg.pt ...    the same for each optimizer tensor
    FOLDER/zero/NAME/step.pt           a number or a one-element tensor
    FOLDER/zero/optimizer_state.pt     options of the groups
    FOLDER/*_model_states.pt           unchanged: buffers, shapes, names of tied parameters

Source: deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from ckptfix.checkpoint import RangeCheck, TensorEntry, dtypes
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.findings.table import found
from ckptfix.formats.deepspeed import PARAMETERS, Save, entries_of, parameters
from ckptfix.formats.folders.nodes import listed, number, numbered
from ckptfix.formats.torch.state import fields
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.formats.zero.frozen_parameters import join_frozen
from ckptfix.formats.zero.joined_tensors import Joiner
from ckptfix.formats.zero.moments import JoinedMoment, OptimizerMoments, groups_of
from ckptfix.formats.zero.object import Parameter, ZeroCheckpoint
from ckptfix.formats.zero.partitions import Shape
from ckptfix.formats.zero.states import Lost, Model, ZeroRankFile, attempt, file_of, read_file, stage_of
from ckptfix.io.virtual_files import SplicedPiece
from ckptfix.pickles.graph import Node
from ckptfix.urls import as_path

FP32, STEP = "fp32.pt", "step.pt"
INFO, VERSION = "universal_checkpoint_info", "universal_checkpoint_version"


def read(save: Save, model: Model, models: Mapping[int, Model | Lost]) -> ZeroCheckpoint:
    """Read the files of `save` as a whole.

    Raises:
        DamagedFile: a file holds no tensor, or a tensor whose size differs from the model states.
        Unsupported: it was joined from model-parallel ranks that do not describe their partition.
    """
    if save.sliced and not fields(model.file.top.get(INFO)).keys() - {VERSION}:
        message = "the model-parallel ranks do not say how its parameters are cut (universal_checkpoint_info)"
        hint = "--inject_missing_state joined them all along dimension 0; join them in the program that saved them"
        raise Unsupported(message, path=save.folder, hint=hint)
    whole = ZeroCheckpoint(model, Joiner(save.path, lambda: None), masters=True)
    settings = attempt(save, f"{PARAMETERS}/optimizer_state.pt", read_file, "")
    top: Mapping[str, Node] = {} if isinstance(settings, Lost) else settings.top
    whole.stage = stage_of(top.get("zero_stage"))
    whole.ranks = number(model.file.top.get("dp_world_size"))
    shapes = {name: shape for group in model.groups for name, shape in group.items()} | model.frozen
    trained = {name for group in model.groups for name in group}
    states: dict[str, dict[str, JoinedMoment | TensorEntry | Node]] = {}
    own = list(parameters(save.folder))
    for name in own:
        if name not in shapes and any(name == key for key, _ in model.module):
            # A buffer cast to fp32, or another name of a parameter: the model states have the original.
            continue
        try:
            whole.parameters[name] = _parameter(whole, save, name, shapes.get(name))
        except DamagedFile as error:
            if name not in shapes:
                raise
            whole.findings.append(found("truncated", error.message, where=f"{PARAMETERS}/{name}/{FP32}"))
            whole.parameters[name] = _damaged(whole, save, name, shapes[name])
        if name in trained or name not in model.frozen:
            states[name] = _states(whole, save, name)
    if whole.stage == 3 and model.frozen and not all(name in whole.parameters for name in model.frozen):
        join_frozen(whole, save, models, max([*models, (whole.ranks or 1) - 1]) + 1)
    for name in trained - whole.parameters.keys():
        message = f"the folder {PARAMETERS}/{name}, which holds all of {name}, is missing"
        whole.findings.append(found("missing-rank", message, where=str(as_path(save.folder, PARAMETERS, name))))
        copy = next((node for key, node in model.module if key == name), None)
        if not is_tensor(copy) or model.file.tensor(copy, name).dtype != "float32":
            # The model's 16-bit copy is not that weight.
            whole.parameters[name] = _damaged(whole, save, name, shapes[name])
    if not isinstance(settings, Lost):
        whole.files.append(settings.mark)
        whole.moments = _moments(settings, model, states)
    return whole


def _moments(
    settings: ZeroRankFile, model: Model, states: dict[str, dict[str, JoinedMoment | TensorEntry | Node]]
) -> OptimizerMoments:
    base = fields(settings.top.get("optimizer_state_dict"))
    options = listed(settings.top.get("param_groups")) or listed(base.get("param_groups"))
    made = OptimizerMoments(settings, states, groups_of(options, model.groups))
    steps = numbered(base.get("state"))
    for place, shapes in enumerate(model.groups):
        step = fields(steps.get(place)).get("step")
        for name in shapes:
            if step is not None and name in states and "step" not in states[name]:
                node = settings.tensor(step, f"state/{place}/step") if is_tensor(step) else step
                states[name]["step"] = node
    return made


def _tensor(file: ZeroRankFile) -> TensorEntry:
    """Return the tensor of a universal checkpoint's file."""
    root = file.root
    return file.tensor(root if is_tensor(root) else file.top.get("param"), "param")


def _parameter(whole: ZeroCheckpoint, save: Save, name: str, shape: Shape | None) -> Parameter:
    file = read_file(file_of(save, f"{PARAMETERS}/{name}/{FP32}"))
    whole.files.append(file.mark)
    entry = _tensor(file)
    own = entry.shape
    if shape is not None and own != shape and not (save.sliced and _is_slice(shape, own)):
        if entry.numel != math.prod(shape) or len(own) != 1:
            raise DamagedFile(f"it holds {list(own)}, but the model states say {list(shape)}", path=file.path)
        own = shape
    return Parameter(entry.dtype, own, whole.joiner.add_later(entry.nbytes, partial(_piece, entry)))


def _is_slice(shape: Shape, whole: Shape) -> bool:
    """Return whether a rank's part of a tensor may have this shape, that is, it is split along one dimension."""
    return len(shape) == len(whole) and sum(one != all_of_it for one, all_of_it in zip(shape, whole, strict=True)) == 1


def _damaged(whole: ZeroCheckpoint, save: Save, name: str, shape: Shape) -> Parameter:
    """Return a parameter that the model states list but whose weights cannot be read; reading it is an error."""

    def again() -> SplicedPiece:
        return _piece(_tensor(read_file(file_of(save, f"{PARAMETERS}/{name}/{FP32}"))))

    nbytes = dtypes.by_name("float32").nbytes(math.prod(shape))
    return Parameter("float32", shape, whole.joiner.add_later(nbytes, again))


def _piece(entry: TensorEntry) -> SplicedPiece:
    storage = entry.storage
    checks = () if storage is None or storage.data is None or storage.crc32 is None else (
        RangeCheck(storage.key, storage.data, storage.crc32),
    )  # fmt: skip
    return SplicedPiece((entry.data,), checks)


def _states(whole: ZeroCheckpoint, save: Save, name: str) -> dict[str, JoinedMoment | TensorEntry | Node]:
    """Return the optimizer state of a parameter. Its tensors have the size of the weights, and are not opened."""
    found: dict[str, JoinedMoment | TensorEntry | Node] = {}
    parameter = whole.parameters[name]
    nbytes = dtypes.by_name(parameter.dtype).nbytes(math.prod(parameter.shape))
    for file_name in entries_of(str(as_path(save.folder, PARAMETERS, name))):
        place = f"{PARAMETERS}/{name}/{file_name}"
        key = file_name.removesuffix(".pt")
        if file_name == STEP:
            file = read_file(file_of(save, place))
            whole.files.append(file.mark)
            root = file.root
            found[key] = file.tensor(root, STEP) if is_tensor(root) else root
        elif file_name.endswith(".pt") and file_name != FP32:
            number = whole.joiner.add_later(nbytes, partial(_moment, save, place, parameter))
            found[key] = JoinedMoment(parameter.dtype, parameter.shape, number)
    return found


def _moment(save: Save, place: str, parameter: Parameter) -> SplicedPiece:
    entry = _tensor(read_file(file_of(save, place)))
    if entry.dtype != parameter.dtype or entry.numel != math.prod(parameter.shape):
        weights = f"{list(parameter.shape)} of {parameter.dtype}"
        message = f"it holds {list(entry.shape)} of {entry.dtype}, but the weights are {weights}"
        raise DamagedFile(message, path=file_of(save, place))
    return _piece(entry)
