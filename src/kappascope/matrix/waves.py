"""Whether the lines of a matrix are waves: a Fourier basis or a table of sinusoidal positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kappascope.matrix import spectra

SHORTEST = 16  # entries: of fewer no window of five frequencies tells a wave from another line
SAMPLED_LINES = 64
WINDOW = 2  # frequencies on either side of the peak: under a Hann window a wave leaks no further
WAVE_ENERGY = 0.95  # of a line in that window: trained filters leave more outside
WAVE_SHARE = 0.9  # of the lines
FEWEST_PEAKS = 8  # different frequencies: smooth lines of one frequency are no basis


def is_sinusoidal(matrix: Tensor) -> bool:
    """Tell whether almost all rows, or almost all columns, are waves of many frequencies.

    >>> angles = torch.arange(32.0)[:, None] * torch.arange(32.0) * torch.pi / 32
    >>> is_sinusoidal(angles.cos()), is_sinusoidal(torch.randn(32, 32))
    (True, False)
    """
    return _are_waves(matrix) or _are_waves(matrix.T)


def _are_waves(lines: Tensor) -> bool:
    count, length = lines.shape
    if count < FEWEST_PEAKS or length < SHORTEST:
        return False
    sample, _ = spectra.scaled_to_one(lines[:: -(-count // SAMPLED_LINES)])
    sample = sample[sample.any(1)]
    if len(sample) < FEWEST_PEAKS:
        return False
    sample = sample / sample.abs().amax(1, keepdim=True)
    energy = torch.fft.rfft(sample * torch.hann_window(length).double()).abs().square()
    energy[:, 1 : (length + 1) // 2] *= 2  # for the frequencies of the other sign
    peaks = energy.argmax(1)
    near = (torch.arange(energy.shape[1]) - peaks[:, None]).abs() <= WINDOW
    inside = (energy * near).sum(1) / energy.sum(1)
    waves = inside >= WAVE_ENERGY
    different = len(peaks[waves].unique())
    return bool(waves.double().mean() >= WAVE_SHARE) and different >= FEWEST_PEAKS
