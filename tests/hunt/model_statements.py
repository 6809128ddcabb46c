"""Statements of models: how layers are called, and what lives between them (statements.py has the notation).

`WIRINGS` are lines of a model's construction: what layers share, and the hooks on them.
"""

from __future__ import annotations

from tests.hunt.fault_statements import FAULT_STATEMENTS_BETWEEN
from tests.hunt.operators import DEVICE
from tests.hunt.statements import parsed

_CATALOGUE = """
# calls of layers
call | 10 | bsh
    {o} = self.hidden({L}({bsh}, mask, rotary=rotary))
call by names | 1 | bsh
    {o} = self.hidden({L}(mask=mask, x={bsh}, rotary=rotary))
call with more | 1 | bsh
    {o} = self.hidden({L}({bsh/a}, mask, rotary, more=dict(first={bsh}, rest=[{bsh}.detach(), ({bsh}, 3)], name='text')))
call twice | 1 | bsh
    {o} = self.hidden({L/a}({bsh}, mask, rotary))
    {o} = self.hidden({L/a}({o}, mask, rotary))
call of halves | 1 | bsh
    {o} = torch.cat([self.hidden({L/a}({t:v}, mask, rotary)) for {t:v} in {bsh}.chunk(2)])
two at once | 1 | bsh
    {t:a} = {bsh}
    {o} = self.hidden({L}({t:a}, mask, rotary)) + self.hidden({L}({t:a}, mask, rotary))
given a view | 1 | bsh
    {o} = self.hidden({L}({bsh}.transpose(0, 1).contiguous().transpose(0, 1), mask, rotary))
given a part | 1 | bsh
    {o} = self.hidden({L}(torch.cat([{bsh/a}, {bsh}], -1)[..., :H], mask, rotary))
checkpointed | 1 | bsh
    {o} = around_layers(lambda v: self.hidden({L}(v, mask, rotary)), {bsh})
checkpointed, reentrant | 1 | bsh
    {o} = checkpoint(lambda v: self.hidden({L}(v, mask, rotary)), {bsh}, use_reentrant=True)
two checkpointed | 1 | bsh
    {o} = around_layers(lambda v: self.hidden({L}(self.hidden({L}(v, mask, rotary)), mask, rotary)), {bsh})
under autocast | 1 | bsh
    with torch.autocast(DEVICE, torch.bfloat16):
        {t:a} = self.hidden({L}({bsh}, mask, rotary))
    {o} = {t:a}.to(x.dtype)
without gradients | 1 | bsh
    with torch.no_grad():
        {t:a} = self.hidden({L}({bsh/a}, mask, rotary))
    {o} = {bsh/a} + {t:a}
of a detached input | 1 | bsh
    {o} = {bsh/a} + self.hidden({L}({bsh/a}.detach(), mask, rotary))
result in place | 1 | bsh
    {o} = self.hidden({L}({bsh}, mask, rotary))
    {o}.mul_({c})
residual in place | 1 | bsh
    {o} = {bsh} * {c}
    {o} += self.hidden({L}({o}, mask, rotary))
input changed after | 1 | bsh
    {t:a} = {bsh} * {c}
    {o} = self.hidden({L}({t:a}, mask, rotary))
    {t:a}.mul_({c})
    {o} = {o} + {t:a}
input changed in part | 1 | bsh
    {t:a} = torch.stack([{bsh}, {bsh}])
    {o} = self.hidden({L}({t:a}[0], mask, rotary))
    {t:a}[1].mul_({c})
    {o} = {o} + {t:a}[1]
result written over | 1 | bsh
    {t:a} = self.hidden({L}({bsh}, mask, rotary))
    {o} = {t:a} * {c}
    {t:a}.detach().zero_()
gradient hook | 1 | bsh
    {o} = self.hidden({L}({bsh}, mask, rotary))
    if {o}.requires_grad:
        {o}.register_hook(lambda grad: grad * {c})
dropped at random | 1 | bsh
    {o} = {bsh}
    if torch.rand(()) < 0.7:
        {o} = self.hidden({L}({o}, mask, rotary))
as a tensor's number says | 1 | bsh
    {o} = {bsh}
    if {o}.mean() > 0:
        {o} = self.hidden({L}({o}, mask, rotary))
rows routed | 1 | bsh
    {t:rows} = ({bsh/a}.detach().mean((1, 2)) > 0).nonzero().squeeze(-1)
    {o} = {bsh/a}
    if {t:rows}.numel():
        {o} = {o}.index_add(0, {t:rows}, self.hidden({L}({bsh/a}[{t:rows}], mask, rotary)))

# between layers
skip | 3 | bsh
    {o} = {bsh} + {c} * {bsh}
gate | 1 | bsh
    {o} = {bsh} * {bsh}.sigmoid()
normalised | 1 | bsh
    {o} = {M:nn.LayerNorm(H)}({bsh})
over the batch | 1 | bsh
    {o} = {M:nn.BatchNorm1d(H)}({bsh}.flatten(0, 1)).view(B, S, H)
dropout between | 1 | bsh
    {o} = F.dropout({bsh}, 0.2)
in place between | 1 | bsh
    {o} = {bsh} * {c}
    {o}.add_({c})
view between | 1 | bsh
    {o} = {bsh}.view(B, S, 4, H // 4).flatten(-2)
detached between | 1 | bsh
    {o} = {bsh} + {bsh}.detach().sin()
noise between | 1 | bsh
    {o} = {bsh/a} + torch.randn_like({bsh/a}) * {c}
"""

_ON_STREAMS = """
call on a stream | 5 | bsh
    with beside({bsh/a}):
        {t:a} = self.hidden({L}({bsh/a}, mask, rotary))
    {o} = joined({t:a})
two on streams | 5 | bsh
    with beside({bsh/a}):
        {t:a} = self.hidden({L}({bsh/a}, mask, rotary))
    with beside({bsh/a}, stream=1):
        {t:b} = self.hidden({L}({bsh/a}, mask, rotary))
    {o} = joined({t:a}) + joined({t:b}) * {c}
one beside the other | 3 | bsh
    with beside({bsh/a}, stream=2):
        {t:a} = self.hidden({L}({bsh/a}, mask, rotary))
    {t:b} = self.hidden({L}({bsh/a}, mask, rotary))
    {o} = joined({t:a}) * {t:b}.sigmoid()
halves on streams | 5 | bsh
    {t:a}, {t:b} = {bsh}.chunk(2)
    for {t:layer} in ({L}, {L}):
        with beside({t:a}):
            {t:a} = self.hidden({t:layer}({t:a}, mask, rotary))
        with beside({t:b}, stream=1):
            {t:b} = self.hidden({t:layer}({t:b}, mask, rotary))
    {o} = torch.cat([joined({t:a}), joined({t:b})])
stream within a stream | 2 | bsh
    with beside({bsh/a}):
        {t:a} = {bsh/a} * {c}
        with beside({t:a}, stream=1):
            {t:b} = self.hidden({L}({t:a}, mask, rotary))
        {t:a} = self.hidden({L}({t:a}, mask, rotary)) + joined({t:b})
    {o} = joined({t:a})
"""

MODEL_STATEMENTS = parsed(_CATALOGUE) | FAULT_STATEMENTS_BETWEEN | (parsed(_ON_STREAMS) if DEVICE != "cpu" else {})

_WIRINGS = """
tied weights | 2 | -
    tied(self.layers)
one module twice | 2 | -
    self.layers[1] = self.layers[0]
frozen | 2 | -
    {L}.requires_grad_(False)
frozen in part | 1 | -
    next(iter({L}.parameters()), self.start).requires_grad_(False)
evaluated | 1 | -
    {L}.eval()
forward hook | 2 | -
    {L}.register_forward_hook(lambda _module, _args, out: out * {c} if isinstance(out, torch.Tensor) else None)
hook before | 1 | -
    shifted_input({L})
backward hook | 2 | -
    halved_gradients({L})
weight norm | 1 | -
    for {t:m} in {L}.modules():
        if isinstance({t:m}, nn.Linear):
            nn.utils.parametrizations.weight_norm({t:m})
spectral norm | 1 | -
    for {t:m} in {L}.modules():
        if isinstance({t:m}, nn.Linear):
            nn.utils.parametrizations.spectral_norm({t:m})
"""

WIRINGS = parsed(_WIRINGS)
