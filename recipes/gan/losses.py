"""The hinge losses of both players, and what the test meters look at.

Lim and Ye, "Geometric GAN" (2017), as Miyato et al. (2018) use them.
"""

import torch
from torch.nn.functional import relu

from phaseloop import Batch, register_criterion

from .model import DigitsGAN


@register_criterion("gan_hinge")
class HingeLosses:
    """For the step `alternating`: a method for each optimizer, and one for tests.

    Samples are those of :class:`DigitsAndNoise`: the discriminator sees images of the first noise,
    the generator learns from the last.
    """

    def discriminator(self, model: DigitsGAN, batch: Batch) -> dict[str, torch.Tensor]:
        """Real images to 1 and above, made ones to -1 and below: mean(relu(1 ∓ D))."""
        with torch.no_grad():
            made = model.generator(batch.target[:, 0])
        # One after the other, since the discriminator looks at how much a batch's images differ.
        return {
            "real": relu(1 - model.discriminator(batch.input)).mean(),
            "made": relu(1 + model.discriminator(made)).mean(),
        }

    def generator(self, model: DigitsGAN, batch: Batch) -> torch.Tensor:
        """-mean(D(made))."""
        return -model.discriminator(model.generator(batch.target[:, -1])).mean()

    def test(self, model: DigitsGAN, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """All images that the samples' noise gives, and the real ones."""
        return model.generator(batch.target.flatten(0, 1)), batch.input
