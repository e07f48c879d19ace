"""Stacks of small models: each trial is the model it would be alone."""

import torch
from torch.optim import Adam

from kappascope.lab.networks import DeepLinear, Perceptron
from kappascope.lab.tasks import Paper, Regression, Teacher, heterogeneous, start
from kappascope.lab.training import last, train


def test_a_product_of_layers_is_trained_as_autograd_would() -> None:
    random = Paper([1]).random()
    task = Regression(heterogeneous(random, 6))
    model = DeepLinear([start(random, 6) for _ in range(3)])
    batch = next(task.batches(random))
    batch.backward(model)
    found = [layer.grad for layer in model.layers]
    expected = torch.autograd.grad(batch.loss(model.product).sum(), list(model.layers))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_network_with_a_rectifier_learns_its_teacher() -> None:
    random = Paper([0]).random()
    teacher = Perceptron([heterogeneous(random, 8) for _ in range(2)])
    student = Perceptron([start(random, 8) for _ in range(2)])
    optimizer = Adam(student.parameters(), lr=0.01)
    last(train(student, optimizer, Teacher(teacher, 8).batches(random), 1000))
    x = random.normal(100, 8)
    error = (student(x) - teacher(x)).norm() / teacher(x).norm()
    assert error.item() < 0.2
