"""Programs with state. Weights of small linears are packed too, since these tests write them."""

from altbackend.fx_passes import onednn

onednn.SMALL = 0
