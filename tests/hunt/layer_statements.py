"""Statements of layers: what a layer's forward may do (statements.py has the notation)."""

from __future__ import annotations

from tests.hunt.fault_statements import FAULT_STATEMENTS
from tests.hunt.operators import DEVICE, EMULATED
from tests.hunt.statements import parsed

_CATALOGUE = """
# pointwise
sin | 1 | same
    {o} = {any}.sin()
tanh | 1 | same
    {o} = {any}.tanh()
gelu | 1 | same
    {o} = F.gelu({any})
silu | 1 | same
    {o} = F.silu({any})
relu | 1 | same
    {o} = {any}.relu()
exp | 1 | same
    {o} = {any}.tanh().exp()
sigmoid | 1 | same
    {o} = {any}.sigmoid()
square | 1 | same
    {o} = {any}.tanh().square()
abs | 1 | same
    {o} = {any}.abs()
softplus | 1 | same
    {o} = F.softplus({any})
reciprocal | 1 | same
    {o} = 1 / (2 + {any}.tanh())
sqrt | 1 | same
    {o} = ({any}.square() + 0.1).sqrt()
clamp | 1 | same
    {o} = {any}.clamp(-0.7, {c})
where | 1 | same
    {o} = torch.where({any/a} > {c}, {any/a}, {any/a}.cos())
scale | 1 | same
    {o} = {any} * {c}
pow | 1 | same
    {o} = ({any}.abs() + 0.1) ** 1.5
erf | 1 | same
    {o} = torch.erf({any})
leaky | 1 | same
    {o} = F.leaky_relu({any}, {c})
lerp | 1 | same
    {o} = torch.lerp({any/a}, {any/a}.sin(), {c})
addcmul | 1 | same
    {o} = torch.addcmul({any/a}, {any/a}, {any/a}.cos(), value={c})
half | 1 | same
    {o} = {any/a}.to(torch.bfloat16).to({any/a}.dtype)
double | 1 | same
    {o} = ({any/a}.double() * {c}).to({any/a}.dtype)
clone | 1 | same
    {o} = {any}.clone()
masked | 1 | same
    {o} = {any/a}.masked_fill({any/a} < 0, {c})
detached | 1 | same
    {o} = {any/a} * {any/a}.detach().cos()
maximum | 1 | same
    {o} = torch.maximum({any/a}, {any/a}.flip(-1))
nan_to_num | 1 | same
    {o} = torch.nan_to_num({any})
compared | 1 | same
    {o} = {any/a} * ({any/a} > {c})
rounded | 1 | same
    {o} = {any/a} + ({any/a} * 4).round() / 8
hardtanh | 1 | same
    {o} = {any/a} * F.hardtanh({any/a})

# of two, and of parameters
add | 2 | bsh
    {o} = {bsh} + {bsh}
mul | 2 | bsh
    {o} = {bsh} * {bsh}.sigmoid()
row | 2 | bsh
    {o} = {bsh} * {bs1}
mean added | 2 | bsh
    {o} = {bsh} + {b1h}
sub | 2 | bsh
    {o} = {bsh} - {c} * {bsh}
div | 2 | bsh
    {o} = {bsh} / (1.5 + {bs1}.abs())
atan2 | 2 | bsh
    {o} = torch.atan2({bsh}, {bsh}.abs() + 1)
glu | 2 | bsh
    {o} = F.glu({bsw}, -1)
stack | 2 | bsh
    {o} = torch.stack([{bsh}, {bsh}, {bsh}]).sum(0)
of rows | 2 | bsh
    {o} = {rows}.view(B, S, H).tanh()
of heads | 2 | bsh
    {o} = {heads}.transpose(1, 2).reshape(B, S, H)
parameter | 2 | bsh
    {o} = {bsh} * {P:H} + {P:H}
of a parameter | 2 | bsh
    {o} = {bsh} + {P:H}.exp().cumsum(0)
cat | 2 | bsh
    {o} = torch.cat([{bsh}[..., : H // 2], {bsh}[..., H // 2 :]], -1)

# shapes
shape bsw | 2 | bsw
    {o} = torch.cat([{bsh/a}, {bsh/a}.sin()], -1)
shape rows | 2 | rows
    {o} = {bsh/a}.reshape(B * S, H)
shape heads | 2 | heads
    {o} = {bsh/a}.view(B, S, 4, H // 4).transpose(1, 2)
shape bs1 | 2 | bs1
    {o} = {bsh/a}.mean(-1, keepdim=True)
shape b1h | 2 | b1h
    {o} = {bsh/a}.mean(1, keepdim=True)
chunk | 2 | bsh
    {t:a}, {t:b} = {bsw}.chunk(2, -1)
    {o} = F.silu({t:a}) * {t:b}
split, unbind | 1 | bsh
    {t:a} = torch.stack({bsw}.split(H, -1), 2).unbind(2)
    {o} = {t:a}[0] - {t:a}[1].sin()
permute | 1 | bsh
    {o} = {bsh}.permute(2, 0, 1).contiguous().sin().permute(1, 2, 0)
transpose | 1 | bsh
    {o} = {bsh}.transpose(1, 2).tanh().transpose(1, 2)
sequence first | 1 | bsh
    {t:a} = {bsh}.transpose(0, 1)
    {o} = F.linear({t:a}.contiguous(), {P:H, H}).transpose(0, 1)
expand | 1 | bsh
    {o} = {bsh/a} * {bs1}.expand(B, S, H).cos()
broadcast | 1 | bsh
    {o} = ({b1h}.expand(B, S, H) + {bsh}).tanh()
narrow | 1 | bsh
    {o} = torch.cat([{bsh/a}.narrow(1, {k/1}, S - {k/1}), {bsh/a}.narrow(1, 0, {k/1})], 1)
roll | 1 | bsh
    {o} = {bsh/a} + torch.roll({bsh/a}, 1, 1)
flip | 1 | bsh
    {o} = {bsh/a} * {bsh/a}.flip(1).sigmoid()
pad | 1 | bsh
    {o} = F.pad({bsh}, (0, 0, 1, 0))[:, :-1]
select | 1 | b1h
    {o} = {bsh}.select(1, {k}).unsqueeze(1)
strided | 1 | bsh
    {t:a} = {bsh}
    {o} = torch.stack([{t:a}[..., ::2], -{t:a}[..., 1::2]], -1).flatten(-2)
repeat | 1 | bsh
    {o} = {bsh}[:, :, : H // 2].repeat(1, 1, 2)
repeat_interleave | 1 | bsh
    {o} = {bsh}[:, :, : H // 2].repeat_interleave(2, -1).sin()
diagonal | 1 | bsh
    {o} = {bsh} + torch.diagonal({P:H, H})
unfold | 1 | bsh
    {o} = F.pad({bsh}, (0, 0, 3, 0)).unfold(1, 4, 1).amax(-1)
tril | 1 | bsh
    {o} = mask.to(x.dtype) @ {bsh} / S
movedim | 1 | heads
    {o} = {heads}.movedim(1, 2).sin().movedim(2, 1)

# reductions and norms
mean | 1 | b1h
    {o} = {bsh}.mean(1, keepdim=True)
sum of features | 1 | bs1
    {o} = ({bsh}.sum(-1, keepdim=True) / H).tanh()
amax | 1 | bs1
    {o} = {bsh}.amax(-1, keepdim=True)
max | 1 | b1h
    {o} = {bsh}.max(1, keepdim=True).values
variance | 1 | bs1
    {o} = ({bsh}.var(-1, keepdim=True) + 0.1).rsqrt()
logsumexp | 1 | bs1
    {o} = {bsh}.logsumexp(-1, keepdim=True).tanh()
softmax | 1 | bsh
    {o} = {bsh}.softmax(-1)
softmax of tokens | 1 | bsh
    {o} = {bsh}.softmax(1)
log_softmax | 1 | bsh
    {o} = F.log_softmax({bsh}, -1).tanh()
norm | 1 | bsh
    {o} = {bsh/a} / ({bsh/a}.norm(dim=-1, keepdim=True) + 1)
normalize | 1 | bsh
    {o} = F.normalize({bsh}, dim=-1, eps=0.1)
layer_norm | 3 | bsh
    {o} = F.layer_norm({bsh}, (H,), {P:H}, {P:H})
LayerNorm | 3 | bsh
    {o} = {M:nn.LayerNorm(H)}({bsh})
RMSNorm | 2 | bsh
    {o} = {M:nn.RMSNorm(H)}({bsh})
RMSNorm written out | 2 | bsh
    {t:a} = {bsh/a}.float()
    {t:a} = {t:a} * torch.rsqrt({t:a}.pow(2).mean(-1, keepdim=True) + 1e-6)
    {o} = {P:H} * {t:a}.to({bsh/a}.dtype)
group_norm | 1 | bsh
    {o} = F.group_norm({rows}, 4, {P:H}, {P:H}).view(B, S, H)
batch_norm | 1 | bsh
    {o} = {M:nn.BatchNorm1d(H)}({rows}).view(B, S, H)
instance_norm | 1 | bsh
    {o} = F.instance_norm({bsh}.transpose(1, 2)).transpose(1, 2)

# products
Linear | 4 | bsh
    {o} = {M:nn.Linear(H, H)}({bsh})
linear | 3 | bsh
    {o} = F.linear({bsh}, {P:H, H}, {P:H})
up | 3 | bsw
    {o} = {M:nn.Linear(H, 2 * H)}({bsh})
down | 3 | bsh
    {o} = F.linear({bsw}, {P:H, 2 * H})
MLP | 2 | bsh
    {o} = {M:nn.Sequential(nn.Linear(H, 2 * H), nn.GELU(), nn.Linear(2 * H, H))}({bsh})
GLU | 2 | bsh
    {o} = F.linear(F.silu(F.linear({bsh/a}, {P:2 * H, H})) * F.linear({bsh/a}, {P:2 * H, H}), {P:H, 2 * H})
shared weight | 1 | bsh
    {t:w} = {P:H, H}
    {o} = F.linear(F.linear({bsh}, {t:w}).tanh(), {t:w}.t())
weight of a product | 1 | bsh
    {o} = F.linear({bsh}, {P:H, 4} @ {P:4, H})
low rank | 1 | bsh
    {o} = F.linear(F.linear({bsh}, {P:4, H}), {P:H, 4}) * {c}
mm | 1 | rows
    {o} = torch.mm({rows}, {P:H, H})
addmm | 1 | rows
    {o} = torch.addmm({P:H}, {rows}, {P:H, H})
bmm | 1 | bsh
    {o} = torch.bmm({bsh}, {P:H, H}.expand(B, H, H))
baddbmm | 1 | bsh
    {o} = torch.baddbmm({bsh}, {bsh}, {P:H, H}.expand(B, H, H), beta={c})
einsum | 1 | bsh
    {o} = torch.einsum('bsh,hk->bsk', {bsh}, {P:H, H})
einsum of heads | 1 | heads
    {o} = torch.einsum('bnsd,nde->bnse', {heads}, {P:4, H // 4, H // 4})
mixed tokens | 1 | bsh
    {o} = torch.einsum('bsh,bth->bst', {bsh/a}, {bsh/a}).tanh() @ {bsh/a} / S
outer | 1 | bsh
    {t:a} = {bsh}
    {o} = ({t:a}.unsqueeze(-1) * {t:a}.unsqueeze(-2)).sum(-1) / H
matmul of a vector | 1 | bs1
    {o} = ({bsh} @ {P:H}).unsqueeze(-1)
conv1d | 1 | bsh
    {o} = F.conv1d(F.pad({bsh}.transpose(1, 2), (3, 0)), {P:H, 1, 4}, groups=H).transpose(1, 2)
conv of one | 1 | bsh
    {o} = F.conv1d({bsh}.transpose(1, 2), {P:H, H, 1}, {P:H}).transpose(1, 2)

# attention
sdpa | 3 | heads
    {o} = F.scaled_dot_product_attention({heads}, {heads}, {heads}, is_causal=True)
sdpa with a mask | 1 | heads
    {o} = F.scaled_dot_product_attention({heads}, {heads}, {heads}, attn_mask=mask)
sdpa with dropout | 1 | heads
    {o} = F.scaled_dot_product_attention({heads}, {heads}, {heads}, dropout_p=0.1, is_causal=True)
sdpa of groups | 1 | heads
    {t:k} = {heads}[:, :2]
    {o} = F.scaled_dot_product_attention({heads}, {t:k}, {t:k}.sin(), is_causal=True, enable_gqa=True)
attention | 3 | bsh
    {t:q}, {t:k}, {t:v} = F.linear({bsh}, {P:3 * H, H}).view(B, S, 3, 4, H // 4).permute(2, 0, 3, 1, 4)
    {o} = F.scaled_dot_product_attention({t:q}, {t:k}, {t:v}, is_causal=True).transpose(1, 2).reshape(B, S, H)
attention written out | 2 | heads
    {t:s} = {heads} @ {heads}.transpose(-1, -2) / 4
    {t:s} = {t:s}.masked_fill(~mask, float('-inf')).softmax(-1)
    {o} = {t:s} @ {heads}
softcap | 1 | heads
    {t:s} = ({heads} @ {heads}.transpose(-1, -2)).div(5).tanh() * 5
    {o} = F.dropout(({t:s} + torch.where(mask, 0.0, -1e4)).float().softmax(-1), 0.1).to(x.dtype) @ {heads}
rotary | 2 | heads
    {t:a} = {heads}
    {o} = {t:a} * rotary[0] + torch.cat([-{t:a}[..., H // 8 :], {t:a}[..., : H // 8]], -1) * rotary[1]
MultiheadAttention | 1 | bsh
    {o} = {M:nn.MultiheadAttention(H, 4, batch_first=True)}({bsh/a}, {bsh/a}, {bsh/a})[0]

# indices
gather | 1 | bsh
    {o} = {bsh/a}.gather(-1, {bsh/a}.argsort(-1))
sort | 1 | bsh
    {o} = {bsh}.sort(-1).values
sort of tokens | 1 | bsh
    {o} = {bsh}.sort(dim=1, stable=True).values * {c}
topk | 1 | bsh
    {t:v}, {t:i} = {bsh/a}.topk(4, -1)
    {o} = torch.zeros_like({bsh/a}).scatter(-1, {t:i}, {t:v}.softmax(-1))
scatter_add | 1 | bsh
    {o} = torch.zeros_like({bsh/a}).scatter_add(-1, {bsh/a}.argsort(-1), {bsh/a})
index_add | 1 | rows
    {o} = {rows}.index_add(0, torch.arange(0, B * S, 2), {rows}[1::2])
index_select | 1 | rows
    {o} = {rows}.index_select(0, torch.randperm(B * S))
index | 1 | rows
    {t:a} = {rows}
    {o} = {t:a}[{t:a}[:, 0].argsort()]
boolean index | 1 | bsh
    {t:a} = {rows}
    {t:m} = {t:a}[:, 0] > 0
    {t:b} = {t:a}[{t:m}].sin()
    {t:c} = {t:a} * 1
    {t:c}[{t:m}] = {t:b}
    {o} = {t:c}.view(B, S, H)
masked_select | 1 | bsh
    {t:a} = {bsh}
    {o} = {t:a} + torch.masked_select({t:a}, {t:a} > 0).sum() / 99
index_put | 1 | rows
    {o} = {rows/a}.index_put((torch.arange({k/1}),), {rows}[: {k/1}])
accumulated | 1 | rows
    {t:i} = torch.arange(B * S) % 7
    {o} = torch.zeros_like({rows/a}).index_put(({t:i},), {rows/a}, accumulate=True)[{t:i}] / 9
embedding | 1 | bsh
    {o} = {bsh/a} + F.embedding(({bsh/a}[..., 0].abs() * 9).long() % 11, {P:11, H})
one_hot | 1 | bsh
    {o} = {bsh/a} + F.one_hot({bsh/a}.argmax(-1), H).to(x.dtype)
cumsum | 1 | bsh
    {o} = {bsh}.cumsum(1) / S
cummax | 1 | bsh
    {o} = {bsh}.cummax(1).values
cumprod | 1 | bsh
    {o} = ({bsh}.tanh() / 4 + 1).cumprod(-1)
positions | 1 | bsh
    {o} = {bsh} * torch.arange(S, dtype=x.dtype).div(S).view(S, 1)
searchsorted | 1 | bsh
    {o} = {bsh/a} * (1 + torch.bucketize({bsh/a}.detach().float(), torch.linspace(-1, 1, 5)) / 8)

# in place
in place, fresh | 3 | same
    {o} = {any} * {c}
    {o}.add_({c}).mul_({c})
in place, as it is | 1 | same
    {o} = {any}
    {o}.add_({c})
in place, relu | 1 | bsh
    {o} = {M:nn.Linear(H, H)}({bsh}).relu_()
in place, sigmoid | 1 | bsh
    {o} = F.linear({bsh}, {P:H, H}).sigmoid_()
in place, masked | 1 | same
    {o} = {any} + 0
    {o}.masked_fill_({o}.detach() > {c}, {c})
in place, copy_ | 1 | bsh
    {o} = torch.zeros_like({bsh/a})
    {o}.copy_({bsh/a})
    {o}.mul_({bsh})
in place, view | 1 | bsh
    {o} = {bsh} * {c}
    {o}.view(-1, H)[::2].mul_({c})
in place, transposed | 1 | bsh
    {o} = {bsh} * {c}
    {o}.transpose(1, 2)[:, : H // 2].add_({c})
in place, after use | 1 | bsh
    {t:a} = {bsh} + {c}
    {o} = {t:a}.clone()
    {t:a}.mul_(2)
    {o} = {o} + {t:a}
in place, noticed | 1 | bsh
    {t:a} = {bsh} + {c}
    {o} = {t:a}.sin()
    {t:a}.mul_(2)
slices assigned | 2 | bsh
    {o} = {bsh} * {c}
    {o}[:, : {k/1}] = {bsh}[:, : {k/1}]
features assigned | 1 | bsh
    {o} = {bsh} * {c}
    {o}[..., ::2] = 0.5
    {o}[..., 1] += 0.25
empty, filled | 2 | bsh
    {o} = torch.empty_like({bsh/a})
    {o}[:, : {k/1}] = {bsh/a}[:, : {k/1}] * 2
    {o}[:, {k/1} :] = {bsh}[:, {k/1} :].sin()
empty, by features | 1 | bsh
    {o} = torch.empty((B, S, H), dtype=x.dtype)
    {o}[..., : H // 2] = {bsh}[..., H // 2 :]
    {o}[..., H // 2 :] = {bsh}[..., : H // 2]
zeros, accumulated | 1 | bsh
    {o} = torch.zeros((B, S, H), dtype=x.dtype)
    for {t:i} in range(3):
        {o}[:, {t:i} :] += {bsh/a}[:, : S - {t:i}] * {c}
out= | 1 | bsh
    with torch.no_grad():
        {t:a} = torch.empty_like({bsh/a})
        torch.sigmoid({bsh/a}, out={t:a})
    {o} = {bsh/a} * {t:a}
out= of nothing | 1 | bsh
    {t:a} = torch.empty(0, dtype=x.dtype)
    torch.cumsum({bsh/a}.detach(), 1, out={t:a})
    {o} = {bsh/a} * {t:a}.cos()
index_put_ | 1 | rows
    {o} = {rows} * 1
    {o}.index_put_((torch.arange(0, B * S, 3),), {rows}[::3], accumulate=True)
index_fill_ | 1 | rows
    {o} = {rows} * 1
    {o}.index_fill_(0, torch.tensor([1, 3]), {c})
index_add_ | 1 | rows
    {o} = torch.zeros_like({rows/a})
    {o}.index_add_(0, torch.arange(B * S) // 2, {rows/a})
scatter_ | 1 | bsh
    {o} = torch.zeros_like({bsh/a})
    {o}.scatter_(-1, {bsh/a}.argsort(-1), {bsh/a})
written over | 1 | bsh
    {o} = {bsh/a}.sin()
    {t:a} = {o} * {o}.detach()
    {o} = {t:a}
    {o}.zero_().add_({bsh})
resized | 1 | bsh
    {t:a} = torch.empty(0, dtype=x.dtype)
    {t:a}.resize_(B, S, H)
    {t:a}.copy_({bsh/a}.detach())
    {o} = {bsh} * {t:a}
input in place | 1 | bsh
    x.mul_({c})
    {o} = x.sin()

# random numbers
dropout | 4 | bsh
    {o} = F.dropout({bsh}, 0.2)
Dropout | 2 | bsh
    {o} = {M:nn.Dropout(0.1)}({bsh})
alpha_dropout | 1 | bsh
    {o} = F.alpha_dropout({bsh}, 0.2, True)
noise | 1 | bsh
    {o} = {bsh/a} + torch.randn_like({bsh/a}) * {c}
noise of a shape | 1 | bsh
    {o} = {bsh} * torch.rand((B, S, 1)).to(x.dtype)
bernoulli | 1 | bsh
    {o} = {bsh/a} * torch.bernoulli(torch.full_like({bsh/a}, 0.7))
rrelu | 1 | bsh
    {o} = F.rrelu({bsh}, training=True)
multinomial | 1 | bsh
    {o} = {bsh/a} * torch.multinomial({bsh/a}.detach().float().softmax(-1).view(-1, H), 1).view(B, S, 1) / H
normal_ | 1 | bsh
    {o} = {bsh} * torch.empty((B, S, H), dtype=x.dtype).normal_().tanh()
generator | 1 | bsh
    {o} = {bsh} * torch.rand((S, H), generator={A:torch.Generator(DEVICE).manual_seed(1)}).to(x.dtype)
Python's numbers | 1 | bsh
    {o} = {bsh} * random.random()
NumPy's numbers | 1 | bsh
    {o} = {bsh} * float(numpy.random.rand())

# paths that data choose
if | 2 | bsh
    {t:a} = {bsh}
    if {t:a}.mean() > 0:
        {o} = {t:a}.sin()
    else:
        {o} = {t:a}.exp().tanh() * {c}
if of tokens | 1 | bsh
    {t:a} = {bsh}
    {o} = F.gelu({t:a})
    if {t:a}[0, 0, 0] > 0:
        {o} = {o} + {M:nn.Linear(H, H)}({o})
item | 2 | bsh
    {o} = {bsh/a} * (1 + {bsh/a}.detach().abs().max().item())
item as a length | 1 | bsh
    {t:a} = {bsh}
    {t:k} = int({t:a}.detach().float().abs().mean() * 20) % S
    {o} = torch.cat([{t:a}[:, : {t:k}].sin(), {t:a}[:, {t:k} :] * {c}], 1)
tolist | 1 | bsh
    {t:a} = {bsh}
    {o} = {t:a} * sum({t:a}[0, 0].detach().tolist())
experts | 3 | bsh
    {t:a} = {rows}
    {t:w} = {P:3, H, H}
    {t:choice} = F.linear({t:a}, {P:3, H}).argmax(-1)
    {o} = torch.zeros_like({t:a})
    for {t:i} in range(3):
        {t:rows} = ({t:choice} == {t:i}).nonzero().squeeze(-1)
        {o} = {o}.index_add(0, {t:rows}, F.gelu(F.linear({t:a}[{t:rows}], {t:w}[{t:i}])))
    {o} = {o}.view(B, S, H)
experts in place | 2 | bsh
    {t:a} = {rows}
    {t:p}, {t:i} = F.linear({t:a}, {P:3, H}).softmax(-1).topk(2, -1)
    {o} = torch.zeros_like({t:a})
    for {t:n}, {t:expert} in enumerate({M:nn.ModuleList([nn.Linear(H, H) for _ in range(3)])}):
        {t:rows}, {t:k} = torch.where({t:i} == {t:n})
        if {t:rows}.numel():
            {o}.index_add_(0, {t:rows}, {t:expert}({t:a}[{t:rows}]) * {t:p}[{t:rows}, {t:k}, None])
    {o} = {o}.view(B, S, H)
experts sorted | 1 | bsh
    {t:a} = {rows}
    {t:choice} = F.linear({t:a}, {P:3, H}).argmax(-1)
    {t:order} = {t:choice}.argsort(stable=True)
    {t:counts} = {t:choice}.bincount(minlength=3).tolist()
    {t:w} = {P:3, H, H}
    {t:parts} = [{t:part} @ {t:w}[{t:i}] for {t:i}, {t:part} in enumerate({t:a}[{t:order}].split({t:counts}))]
    {o} = torch.empty_like({t:a})
    {o}[{t:order}] = torch.cat({t:parts})
    {o} = {o}.view(B, S, H)
loop | 1 | bsh
    {o} = {bsh}
    for {t:i} in range(3):
        {o} = torch.tanh({o} + {c} * {o}.roll({t:i}, 1))
scan | 1 | bsh
    {t:a} = {bsh}
    {t:state} = torch.zeros_like({t:a}[:, 0])
    {t:states} = []
    for {t:i} in range(S):
        {t:state} = {t:state} * 0.5 + {t:a}[:, {t:i}]
        {t:states}.append({t:state})
    {o} = torch.stack({t:states}, 1)

# side effects
books | 1 | bsh
    {A:[]}.append(float({bsh/a}.detach().sum()))
    {o} = {bsh/a}.sin()
counter | 1 | bsh
    self.calls += 1
    {o} = {bsh} * (1 + 0.1 * self.calls)
counter in a dictionary | 1 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {o} = {bsh} / {t:d}['calls']
kept aside | 1 | bsh
    self.aside = {bsh/a}.sin()
    {o} = {bsh} * self.aside
kept in a list | 1 | bsh
    {t:l} = {A:[]}
    {t:l}.append({bsh/a}.detach())
    {o} = {bsh/a} + {t:l}[-1] * {c}
buffer | 1 | bsh
    {t:b} = {B:H}
    with torch.no_grad():
        {t:b}.mul_(0.9).add_({bsh/a}.detach().mean((0, 1)), alpha=0.1)
    {o} = {bsh} - {t:b}.clone()
buffer read | 1 | bsh
    {o} = {bsh} + {B:H}.cos()
global | 1 | bsh
    {o} = {bsh} * TABLE
hook that changes | 1 | bsh
    {o} = {M:hooked(nn.Linear(H, H), 1.5)}({bsh})
hook that counts | 1 | bsh
    {o} = {M:counted(nn.Linear(H, H))}({bsh})
hook of a gradient | 1 | bsh
    {o} = {bsh} * {c}
    if {o}.requires_grad:
        {o}.register_hook(lambda grad: grad * 0.5)

# functions and operators of one's own
Function | 1 | bsh
    {o} = Scaled.apply({bsh}, {P:H})
Function in place | 1 | bsh
    {o} = DoubledInPlace.apply({bsh} * {c})
Function of two | 1 | bsh
    {t:a}, {t:b} = Parted.apply({bsh})
    {o} = torch.cat([{t:b}, {t:a}], -1)
custom operator | 1 | bsh
    {o} = torch.ops.memo_random.smooth({bsh})
custom operator in place | 1 | bsh
    {t:a} = {bsh/a}.detach().clone()
    torch.ops.memo_random.halve({t:a})
    {o} = {bsh/a} * {t:a}
custom operator of tokens | 1 | bsh
    {o} = torch.ops.memo_random.carried({bsh})
opaque, empty | 1 | bsh
    {o} = Opaque.apply({bsh}, torch.empty_like)
opaque, zeros | 1 | bsh
    {o} = Opaque.apply({bsh}, torch.zeros_like)
opaque, copy | 1 | bsh
    {o} = Opaque.apply({bsh}, torch.clone)
opaque, factor | 1 | bsh
    {t:a} = torch.empty((B, S, H), dtype=x.dtype)
    fill({t:a}, {bsh/a})
    {o} = {bsh/a} * {t:a}
opaque, over zeros | 1 | bsh
    {t:a} = torch.zeros((B, S, H), dtype=x.dtype)
    fill({t:a}, {bsh/a})
    {o} = {bsh/a} * {t:a}.sin()
opaque, over a value | 1 | bsh
    {t:a} = {bsh/a}.detach() * 2
    fill({t:a}, {bsh/a})
    {o} = {bsh/a} * {t:a}
opaque, a part | 1 | bsh
    {t:a} = {bsh/a}.detach().clone()
    fill({t:a}[:, 4:], {bsh/a}[:, 4:])
    {o} = {bsh/a}.cos() * {t:a}
opaque, then seen | 1 | bsh
    {t:a} = torch.empty_like({bsh/a})
    fill({t:a}, {bsh/a})
    {t:a}.mul_(2)
    {o} = {bsh/a} * {t:a}.cos()
opaque, over a result | 1 | bsh
    {t:a} = {bsh} * {c}
    fill({t:a}, {bsh/a})
    {o} = {t:a}.sin() + {t:a}
custom operator that calls others | 1 | bsh
    {o} = torch.ops.memo_random.projected({bsh}, {P:H, H}).to(x.dtype)

# what is declared to memo
memoized | 1 | bsh
    {o} = memoized_noise({bsh}) * {bsh}.sin()
token-local | 1 | bsh
    {o} = recomputable_gate({bsh}, {P:H})
kept | 1 | bsh
    {o} = memo.keep({bsh} * {c}).sin()

# regions
checkpoint | 1 | bsh
    def {t:f}({t:v}):
        {block:{t:v}}
    {o} = checkpoint({t:f}, {bsh}, use_reentrant=False)
checkpoint, reentrant | 1 | bsh
    def {t:f}({t:v}):
        {block:{t:v}}
    {o} = checkpoint({t:f}, {bsh}, use_reentrant=True)
autocast | 2 | bsh
    with torch.autocast(DEVICE, torch.bfloat16):
        {t:a} = {M:nn.Linear(H, H)}({bsh})
        {t:b} = F.linear({t:a}, {P:H, H}).softmax(-1)
    {o} = {t:b}.to(x.dtype)
autocast off | 1 | bsh
    with torch.autocast(DEVICE, enabled=False):
        {t:a} = {bsh}.float() @ {P:H, H}.float()
    {o} = {t:a}.to(x.dtype)
no_grad | 1 | bsh
    with torch.no_grad():
        {t:a} = F.linear({bsh/a}, {P:H, H}).softmax(-1)
    {o} = {bsh/a} * {t:a}
inner function | 2 | bsh
    def {t:f}({t:v}):
        {block:{t:v}}
    {o} = {t:f}({bsh}) + {t:f}({bsh})
either | 1 | bsh
    def {t:f}({t:v}):
        {block:{t:v}}
    def {t:g}({t:w}):
        {block:{t:w}}
    {t:a} = {bsh}
    {o} = {t:f}({t:a}) if {t:a}.sum() > 0 else {t:g}({t:a})
vmap | 1 | bsh
    {t:w} = {P:H, H}
    {o} = torch.vmap(lambda v: torch.tanh(v @ {t:w}))({bsh})
compiled | 0.1 | bsh
    def {t:f}({t:v}):
        {block:{t:v}}
    {o} = torch.compile({t:f}, backend='aot_eager', dynamic=False)({bsh})

# what a layer is given besides
more | 2 | bsh
    {o} = {bsh} if more is None else {bsh} * more['first'].sin() + more['rest'][1][0]
more, changed | 0.3 | bsh
    {o} = {bsh/a} * {c}
    if more is not None:
        more['rest'].append({o})
        {o} = {o} + more['rest'][0]

# kinds of tensors
subclass | 0.5 | bsh
    {o} = ({bsh}.as_subclass(Tagged).sin() * {c}).as_subclass(torch.Tensor)
complex | 0.5 | bsh
    {t:a} = torch.view_as_complex({bsh}.float().reshape(B, S, H // 2, 2).contiguous())
    {o} = torch.view_as_real({t:a} * {t:a}.conj() + {t:a}.exp().conj()).flatten(-2).tanh().to(x.dtype)
fft | 0.5 | bsh
    {o} = torch.fft.irfft(torch.fft.rfft({bsh}.float(), dim=-1), n=H, dim=-1).to(x.dtype)
jagged | 0.3 | bsh
    {t:a} = {bsh}.float()
    {t:n} = torch.nested.nested_tensor([{t:a}[0, :9], {t:a}[1]], layout=torch.jagged)
    {o} = {bsh} + ({t:n}.sin() * {t:n}).values().mean().to(x.dtype)
sparse | 0.3 | bsh
    {t:a} = (torch.eye(S) * {bsh/a}.detach().float().mean()).to_sparse()
    {o} = torch.stack([torch.sparse.mm({t:a}, {t:v}.float()) for {t:v} in {bsh/a}.unbind(0)]).to(x.dtype)
saved, then changed | 3 | bsh
    {t:a} = {bsh} * {c}
    {t:b} = {t:a}.sin()
    {t:e} = {bsh}.sigmoid().cos()
    {t:a}.add_({c})
    {o} = {t:a}.cos() * {t:e}
alias | 1 | bsh
    {t:a} = {bsh} * {c}
    {t:b} = {t:a}.view(B, S, 2, H // 2)
    {t:e} = {t:a}.sin()
    {t:b}[:, :, 0].mul_({c})
    {o} = {t:a} + {t:e}
as_strided | 0.5 | bsh
    {t:a} = {bsh}.contiguous() * {c}
    {o} = {t:a}.as_strided((B, S, H), {t:a}.stride(), 0).sin()
unsafe parts | 0.5 | bsh
    {t:a}, {t:b} = torch.unsafe_chunk({bsh} * {c}, 2, -1)
    {t:a}.mul_({c})
    {o} = torch.cat([{t:a}.sin(), {t:b}.cos()], -1)
swapped data | 0.3 | bsh
    {t:a} = {bsh/a}.detach() * {c}
    {t:a}.data = {t:a}.data.clone() * 2
    {o} = {bsh/a} * {t:a}

# operators of torch's samples
operator | 25 | bsh
    {o} = {bsh/a} + {O:}({bsh/a}) / 9
operator in place | 8 | bsh
    {o} = {bsh/a} + {O:, in_place=True}({bsh/a}) / 9
"""

_ON_A_DEVICE = """
branch on a stream | 8 | bsh
    with beside({bsh/a}):
        {t:a} = F.gelu(F.linear({bsh/a}, {P:H, H}))
    {t:b} = {bsh/a}.sigmoid() * {c}
    {o} = joined({t:a}) * {t:b}
block on a stream | 8 | bsh
    def {t:f}({t:v}):
        {block:{t:v}}
    with beside({bsh/a}, stream=1):
        {t:a} = {t:f}({bsh/a})
    {o} = joined({t:a}) + {bsh/a}.cos()
in place on a stream | 3 | bsh
    {t:a} = {bsh} * {c}
    with beside({t:a}, stream=2):
        {t:b} = {t:a}.sin()
        {t:a}.mul_({c})
    {o} = joined({t:b}) + {t:a}
random on a stream | 3 | bsh
    with beside({bsh/a}):
        {t:a} = F.dropout({bsh/a}, 0.2)
    {o} = F.dropout({bsh/a}, 0.3) + joined({t:a})
on the host | 3 | bsh
    {t:a} = ({bsh/a}.detach().cpu() * 2).cos()
    {o} = {bsh/a} * ({t:a} * {t:a}.sin()).to(DEVICE)
number on the host | 2 | bsh
    {t:a} = {bsh/a}.detach().abs().mean().cpu()
    {o} = {bsh/a} * ({t:a} * 2).sqrt()
waited for on the host | 3 | bsh
    {t:a} = {bsh/a}.detach().to('cpu', non_blocking=True)
    torch.cuda.current_stream().synchronize()
    {o} = {bsh/a} * ({t:a} * {c}).cos().to(DEVICE)
product on the host | 3 | bsh
    {t:a} = {bsh/a}.detach().float().cpu() @ (torch.eye(H, device='cpu') + 0.1)
    {t:b} = ({t:a}.float().unsqueeze(-1) * torch.arange(16.0, device='cpu')).to(DEVICE)
    {o} = ({t:b}.cos() * {bsh/a}.unsqueeze(-1)).sum(-1).to({bsh/a}.dtype)
index from the host | 2 | bsh
    {o} = {bsh/a}[..., {bsh/a}.detach().mean((0, 1)).cpu().argsort()].cos()
shape on the host | 1 | bsh
    {o} = {bsh/a} * (torch.empty({bsh/a}.shape, device='meta') + 1).sum(-1).shape[0]
"""

LAYER_STATEMENTS = parsed(_CATALOGUE) | FAULT_STATEMENTS | (parsed(_ON_A_DEVICE) if DEVICE != "cpu" else {})
if EMULATED:  # which has no kernels for sparse tensors
    LAYER_STATEMENTS = {name: drawn for name, drawn in LAYER_STATEMENTS.items() if not name.startswith("sparse")}
