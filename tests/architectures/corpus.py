"""Models of real files in the corpus, written again under their names, each with a twin that has other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from architectures import llama
from architectures.family import Family, Pair, Style, noise, tokens
from architectures.lstm import Wrapped
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional


class RNet(nn.Module):
    """Second stage of the MTCNN face detector, as facenet-pytorch names it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 28, 3)
        self.prelu1 = nn.PReLU(28)
        self.conv2 = nn.Conv2d(28, 48, 3)
        self.prelu2 = nn.PReLU(48)
        self.conv3 = nn.Conv2d(48, 64, 2)
        self.prelu3 = nn.PReLU(64)
        self.dense4 = nn.Linear(576, 128)
        self.prelu4 = nn.PReLU(128)
        self.dense5_1 = nn.Linear(128, 2)
        self.dense5_2 = nn.Linear(128, 4)

    def forward(self, x: Tensor) -> Any:
        x = functional.max_pool2d(self.prelu1(self.conv1(x)), 3, 2, ceil_mode=True)
        x = functional.max_pool2d(self.prelu2(self.conv2(x)), 3, 2, ceil_mode=True)
        x = self.prelu4(self.dense4(self.prelu3(self.conv3(x)).flatten(1)))
        return self.dense5_1(x), self.dense5_2(x)


class RNetTwin(nn.Module):
    """features.N, fc, act, and two heads defined the other way round."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 28, 3),
            nn.PReLU(28),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(28, 48, 3),
            nn.PReLU(48),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            nn.Conv2d(48, 64, 2),
            nn.PReLU(64),
        )
        self.fc = nn.Linear(576, 128)
        self.act = nn.PReLU(128)
        self.box = nn.Linear(128, 4)
        self.face = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.fc(self.features(x).flatten(1)))
        return self.face(x), self.box(x)


class Mnist(nn.Module):
    """Digits, as an example of burn names it: the norms follow the convolutions and the last layer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.conv3 = nn.Conv2d(16, 24, 3)
        self.norm1 = nn.BatchNorm2d(24)
        self.fc1 = nn.Linear(24 * 22 * 22, 32)
        self.fc2 = nn.Linear(32, 10)
        self.norm2 = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Any:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = functional.relu(self.norm1(functional.relu(self.conv3(x)))).flatten(1)
        return self.norm2(self.fc2(functional.relu(self.fc1(x))))


class MnistTwin(nn.Module):
    """Everything numbered."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 24, 3),
            nn.ReLU(),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(24 * 22 * 22, 32), nn.ReLU(), nn.Linear(32, 10), nn.BatchNorm1d(10))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x))


class LeNet(nn.Module):
    """conv1, conv2, fc1, fc2, fc3."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Any:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(functional.relu(self.fc2(functional.relu(self.fc1(x)))))


class LeNetTwin(nn.Module):
    """classifier before features."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.features(x).flatten(1))


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers at 0, 2, ..., tanh between them."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class ActorCritic(nn.Module):
    """actor.0, actor.2, actor.4, critic.0 ...: but for the last layers both are alike."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.actor = perceptron(4, 64, 64, 2)
        self.critic = perceptron(4, 64, 64, 1)

    def forward(self, x: Tensor) -> Any:
        return self.actor(x), self.critic(x)


class StableBaselines(nn.Module):
    """mlp_extractor.policy_net, mlp_extractor.value_net, action_net, value_net."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        names = ("policy_net", "value_net")
        self.mlp_extractor = nn.ModuleDict({name: perceptron(4, 64, 64) for name in names})
        self.action_net = nn.Linear(64, 2)
        self.value_net = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Any:
        policy, value = (torch.tanh(self.mlp_extractor[name](x)) for name in ("policy_net", "value_net"))
        return self.action_net(policy), self.value_net(value)


class SpinningUp(nn.Module):
    """v.v_net.N before pi.logits_net.N: the order of the parts decides nothing, the last layers' shapes everything."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.v = nn.ModuleDict({"v_net": perceptron(4, 64, 64, 1)})
        self.pi = nn.ModuleDict({"logits_net": perceptron(4, 64, 64, 2)})

    def forward(self, x: Tensor) -> Any:
        return self.pi["logits_net"](x), self.v["v_net"](x)


SHORTCUT = 0.5
"""As in `resnet`; here the sum is of a block and what went around it."""


class CifarBlock(nn.Module):
    """conv1, bn1, conv2, bn2; its shortcut has no weights."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.stride, self.added = outside // inside, outside - inside
        self.conv1 = nn.Conv2d(inside, outside, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        kept = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return functional.relu(y + SHORTCUT * kept)


class CifarTwinBlock(nn.Module):
    """All norms before all convolutions: norms.0, norms.1, convs.0, convs.1."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.stride, self.added = outside // inside, outside - inside
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inside, outside, 3, self.stride, padding=1, bias=False),
                nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            ]
        )

    def forward(self, x: Tensor) -> Any:
        y = self.norms[1](self.convs[1](functional.relu(self.norms[0](self.convs[0](x)))))
        kept = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return functional.relu(y + SHORTCUT * kept)


def stage(block: type[nn.Module], number: int) -> nn.Sequential:
    """Three blocks; the first of the second and third stage doubles the channels."""
    width = 16 << number
    return nn.Sequential(block(width // 2 if number else width, width), block(width, width), block(width, width))


class Resnet20(nn.Module):
    """conv1, bn1, layer1.0.conv1 ..., linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (stage(CifarBlock, number) for number in range(3))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


class Resnet20Twin(nn.Module):
    """stem.norm before stem.conv, stages.0.0.norms.0 ..., head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.ModuleDict(
            {"norm": nn.BatchNorm2d(16), "conv": nn.Conv2d(3, 16, 3, padding=1, bias=False)}
        )
        self.stages = nn.Sequential(*(stage(CifarTwinBlock, number) for number in range(3)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.stages(functional.relu(self.stem["norm"](self.stem["conv"](x))))
        return self.head(x.mean((2, 3)))


FAIR = llama.Sizes(vocabulary=500, width=32, heads=4, keys=32, hidden=256)


@dataclass(frozen=True, slots=True)
class RealModel:
    """A file of the corpus, and its architecture: the first style has the names of the file.

    Attributes:
        path: in the corpus.
        under: key of the state dict in the file; "" where the file is one.
    """

    path: str
    family: Family
    under: str = ""

    def state(self, corpus: Path) -> Mapping[str, Tensor]:
        """The state dict, in the order of the file."""
        path = corpus / self.path
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        state: Mapping[str, Tensor] = found[self.under] if self.under else found
        return state

    @property
    def pair(self) -> Pair:
        """From the names of the file to the others."""
        return Pair(self.family, *self.family.styles)


DIGITS = Family("MNIST", (Style("burn", Mnist), Style("numbered", MnistTwin)), lambda: (noise(2, 1, 28, 28),))

REAL: tuple[RealModel, ...] = (
    RealModel(
        "timesler+facenet-pytorch/data/rnet.pt",
        Family("RNet", (Style("facenet", RNet), Style("numbered", RNetTwin)), lambda: (noise(2, 3, 24, 24),)),
    ),
    RealModel("tracel-ai+burn/examples/import-model-weights/weights/mnist.pt", DIGITS),
    RealModel("tracel-ai+burn/examples/import-model-weights/weights/mnist.safetensors", DIGITS),
    RealModel(
        "pytorch+captum/captum/insights/attr_vis/models/cifar_torchvision.pt",
        Family("LeNet", (Style("captum", LeNet), Style("numbered", LeNetTwin)), lambda: (noise(2, 3, 32, 32),)),
    ),
    RealModel(
        "nikhilbarhate99+PPO-PyTorch/PPO_preTrained/CartPole-v1/PPO_CartPole-v1_0_0.pth",
        Family(
            "actor and critic",
            (Style("PPO-PyTorch", ActorCritic), Style("stable-baselines3", StableBaselines)),
            lambda: (noise(5, 4),),
        ),
    ),
    RealModel(
        "nikhilbarhate99+PPO-PyTorch/PPO_preTrained/CartPole-v1/PPO_CartPole-v1_0_0.pth",
        Family(
            "critic and actor",
            (Style("PPO-PyTorch", ActorCritic), Style("Spinning Up, turned round", SpinningUp)),
            lambda: (noise(5, 4),),
        ),
    ),
    RealModel(
        "akamaster+pytorch_resnet_cifar10/pretrained_models/resnet20-12fca82f.th",
        Family(
            "ResNet-20",
            (Style("akamaster, wrapped", lambda depth: Wrapped("module", Resnet20())), Style("lists", Resnet20Twin)),
            lambda: (noise(2, 3, 16, 16),),
        ),
        under="state_dict",
    ),
    RealModel(
        "pytorch+torchtune/tests/assets/tiny_fair_checkpoint.pt",
        Family(
            "tiny LLaMA",
            (
                Style("Meta", lambda depth: llama.Meta(depth, FAIR)),
                Style("transformers", lambda depth: llama.Transformers(depth, FAIR)),
            ),
            lambda: (tokens(2, 9, 500),),
        ),
    ),
)
