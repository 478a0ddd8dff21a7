"""Invertible maps applied to keys or values before quantizing, with what they ask of the queries."""

from kvlab.transforms.base import Chain, Transform
from kvlab.transforms.center import Center
from kvlab.transforms.fold import FoldedQKNorm
from kvlab.transforms.hadamard import Hadamard, RandomizedHadamard, randomized_hadamard
from kvlab.transforms.hadamard_matrix import hadamard_matrix
from kvlab.transforms.matrix import Matrix, OrthogonalMatrix
from kvlab.transforms.scale import ChannelScale

__all__ = [
    "Center",
    "Chain",
    "ChannelScale",
    "FoldedQKNorm",
    "Hadamard",
    "Matrix",
    "OrthogonalMatrix",
    "RandomizedHadamard",
    "Transform",
    "hadamard_matrix",
    "randomized_hadamard",
]
