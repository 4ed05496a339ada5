"""Rows beyond recognition: whether they still go with their own tokens, or are states of other ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eyas.align.defects.evidence import Evidence
from eyas.align.defects.kinds import Diagnosis

if TYPE_CHECKING:
    from torch import Tensor

FOLLOWED = 0.2  # by how much rows must be more alike their own token's than another's, in cosine
PROFILE_ROOM = 1.5  # times the difference of two samples' channel profiles at one tap


def follows_its_tokens(ev: Evidence, d: Diagnosis) -> int | None:
    """The tap whose rows these are like, each more than any other token's: the right tokens in other weights."""
    import torch

    alive = ev.alive(d.sample, d.slot).clone()
    alive[0] = False
    candidates = (ev.declared(d.slot), None if d.match.best is None else ev.index[d.match.best])
    if int(alive.sum()) < 12:
        return None
    x = ev.rows(d.sample, d.slot)[alive].float()
    x = torch.nn.functional.normalize(x - x.mean(0), dim=-1)
    for tap in dict.fromkeys(index for index in candidates if index is not None):
        r = ev.target.taps(ev.ids[d.sample])[tap].cpu()[alive].float()
        r = torch.nn.functional.normalize(r - r.mean(0), dim=-1)
        own = float((x * r).sum(-1).median())
        others = max(float((x * r.roll(k, 0)).sum(-1).median()) for k in (-2, -1, 1, 2))
        if own > others + FOLLOWED:
            return tap
    return None


def find_profile(ev: Evidence, d: Diagnosis) -> int | None:
    """The tap whose root mean square per channel, over tokens, these rows have: states of other tokens."""
    import torch

    alive = ev.alive(d.sample, d.slot).clone()
    alive[0] = False
    if int(alive.sum()) < 16 or len(ev.samples) < 2:
        return None

    def rms(rows: Tensor) -> Tensor:
        unit = rows.float() / rows.float().norm(dim=-1, keepdim=True).clamp_min(1e-20)
        size: Tensor = rows.float().norm(dim=-1).median(-1).values
        profile: Tensor = unit.square().mean(-2).sqrt() * size[..., None]
        return profile

    own = rms(ev.target.taps(ev.ids[d.sample])[:, 1:].cpu())  # [L+2, H]
    others = [rms(ev.target.taps(ids)[:, 1:].cpu()) for n, ids in enumerate(ev.ids) if n != d.sample and len(ids) >= 16]
    if not others:
        return None
    mine = rms(ev.rows(d.sample, d.slot)[alive])
    room = torch.stack([(other - own).norm(dim=-1) / own.norm(dim=-1) for other in others]).amax(0)  # [L+2]
    distance = (mine - own).norm(dim=-1) / own.norm(dim=-1)
    index = int(distance.argmin())
    return index if float(distance[index]) <= PROFILE_ROOM * float(room[index]) and float(room[index]) < 0.5 else None
