"""Teachers have the kappa they should, and near students are as far off as stated."""

import pytest
import torch

from kappascope.lab.tasks import generator
from kappascope.studies.teacher import model
from kappascope.studies.teacher.model import (
    ARCHITECTURES,
    KAPPA,
    Architecture,
    Network,
    optimizers,
    student,
    teacher,
)

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)


def made(architecture: Architecture, seed: int = 0) -> Network:
    return teacher(architecture, generator("test", seed)).double()


class TestNetworks:
    @architectures
    def test_every_matrix_of_a_teacher_has_the_kappa_it_should(self, architecture):
        for matrix in made(architecture).matrices:
            s = torch.linalg.matrix_norm(matrix[:, :-1], 2) / torch.linalg.matrix_norm(
                matrix[:, :-1], -2
            )
            assert s.item() == pytest.approx(KAPPA, rel=1e-4)

    @architectures
    def test_a_near_student_is_as_far_off_as_stated(self, architecture):
        master = teacher(architecture, generator("near"))
        near = student(master, "near", generator("start"))
        for a, b in zip(near.linear, master.linear, strict=True):
            off = (a.weight - b.weight).norm() / b.weight.norm()
            assert off.item() == pytest.approx(model.NEAR, rel=0.3)

    def test_muon_has_the_matrices_and_adam_the_biases(self):
        parts = optimizers("muon", Network(ARCHITECTURES[0]), 0.1)
        ranks = {
            name: {p.ndim for p in part.param_groups[0]["params"]} for name, part in parts.items()
        }
        assert ranks == {"muon": {2}, "biases": {1}}
