"""A DCGAN for images of 8x8, its discriminator kept smooth by spectral norms.

Radford, Metz, Chintala, "Unsupervised representation learning with deep convolutional generative
adversarial networks" (2016); Miyato et al., "Spectral normalization for generative adversarial
networks" (2018).
"""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from phaseloop import register_model

from .data import NOISE


class Spread(nn.Module):
    """Adds a channel with one number: how much the images of the batch differ from each other.

    It is the standard deviation over the batch, averaged over channels and places. A generator that
    makes the same digit again and again is found out by it. Karras et al., "Progressive growing of
    GANs" (2018), section 3.
    """

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map [B, C, H, W] to [B, C + 1, H, W]."""
        spread = features.var(dim=0, unbiased=False).add(1e-8).sqrt().mean()
        return torch.cat([features, spread.expand(len(features), 1, *features.shape[2:])], dim=1)


def _up(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.ConvTranspose2d(channels_in, channels_out, kernel_size=4, stride=2, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    ]


@register_model("digits_gan")
class DigitsGAN(nn.Module):
    """A generator and a discriminator, which are called as `generator` and `discriminator`.

    Args:
        width: of the generator, channels at 4x4 pixels.
        critic_width: of the discriminator, channels at 8x8 pixels.
    """

    def __init__(self, width: int = 32, critic_width: int = 32) -> None:
        super().__init__()
        if width < 2 or critic_width < 1:
            raise ValueError(f"width is {width} and critic_width {critic_width}: too small")
        w, c = width, critic_width
        self.generator = nn.Sequential(  # noise [B, NOISE] to images [B, 1, 8, 8] from 0 to 1
            nn.Linear(NOISE, 8 * w),
            nn.Unflatten(1, (2 * w, 2, 2)),
            nn.BatchNorm2d(2 * w),
            nn.ReLU(),
            *_up(2 * w, w),  # [B, w, 4, 4]
            *_up(w, w // 2),  # [B, w / 2, 8, 8]
            nn.Conv2d(w // 2, 1, kernel_size=3, padding=1),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(  # images to how real they look [B, 1]
            spectral_norm(nn.Conv2d(1, c, kernel_size=3, padding=1)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(c, 2 * c, kernel_size=4, stride=2, padding=1)),
            nn.LeakyReLU(0.2),
            Spread(),
            spectral_norm(nn.Conv2d(2 * c + 1, 2 * c, kernel_size=3, padding=1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            spectral_norm(nn.Linear(2 * c * 4 * 4, 1)),
        )
