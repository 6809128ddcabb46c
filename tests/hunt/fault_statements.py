"""Statements of the kinds in which silent faults were found (statements.py has the notation).

Masks of each shape that broadcasts, kernels of torch.library, complex and sparse values, what starts in a later call, and
writes that nothing counts. Those called `uncounted` are compared where docs/recompute.md promises anything: with
`verify=True`, the same result or `ModifiedAfterSave`.
"""

from __future__ import annotations

from tests.hunt.statements import parsed

_CATALOGUE = """
# masks
mask of sequences | 3 | bsh
    {o} = {bsh} + {bsh} * (torch.empty(B, 1, 1).bernoulli_(0.6) / 0.6).to(x.dtype)
mask of sequences and features | 3 | bsh
    {o} = {bsh} * torch.empty((B, 1, H), dtype=x.dtype).bernoulli_(0.8)
mask of tokens | 3 | bsh
    {o} = {bsh} * torch.bernoulli(torch.full((1, S, 1), 0.8)).to(x.dtype)
mask of features | 3 | bsh
    {o} = {bsh} * torch.empty(H, dtype=x.dtype).bernoulli_(0.8)
mask of one number | 3 | bsh
    {o} = {bsh/a} + {bsh/a}.sin() * torch.empty((), dtype=x.dtype).bernoulli_(0.5)
mask of heads | 3 | heads
    {o} = {heads} * torch.empty((B, 4, 1, 1), dtype=x.dtype).bernoulli_(0.7)
mask of shared heads | 3 | heads
    {o} = {heads} * (torch.rand(4, 1, 1) < 0.7)
mask of heads and tokens | 3 | heads
    {o} = {heads} * torch.empty((1, 4, S, 1), dtype=x.dtype).bernoulli_(0.7)
dropout of any shape | 6 | same
    {o} = F.dropout({any}, 0.3)
dropout in place | 3 | same
    {o} = F.dropout({any} * {c}, 0.3, inplace=True)
dropout1d of tokens | 3 | bsh
    {o} = F.dropout1d({bsh}, 0.3)
dropout1d of features | 3 | bsh
    {o} = F.dropout1d({bsh}.transpose(1, 2), 0.3).transpose(1, 2)
dropout2d of heads | 3 | heads
    {o} = F.dropout2d({heads}, 0.3)
feature_alpha_dropout | 3 | bsh
    {o} = F.feature_alpha_dropout({bsh}, 0.3, True)
native_dropout | 3 | bsh
    {t:a}, {t:m} = torch.native_dropout({bsh/a}, 0.3, True)
    {o} = torch.where({t:m}, {t:a}, {bsh/a}.cos())
masked_fill, sequences | 3 | bsh
    {o} = {bsh}.masked_fill(torch.empty(B, 1, 1).bernoulli_(0.5).bool(), {c})
masked_fill, tokens | 3 | bsh
    {o} = {bsh}.masked_fill(torch.rand(S, 1) < 0.4, {c})
masked_fill, shared | 3 | bsh
    {t:m} = torch.rand(B, 1, H) < 0.4
    {o} = {bsh}.masked_fill({t:m}, 0.0) * {bsh}.sigmoid().masked_fill(~{t:m}, {c})
where, features | 3 | bsh
    {o} = torch.where(torch.rand(H) < 0.7, {bsh}, {bsh}.sin())
zoneout | 3 | bsh
    {t:m} = torch.empty((B, S, 1)).bernoulli_(0.5).bool()
    {o} = torch.where({t:m}, {bsh}, {bsh}.tanh())
gate of sequences drawn | 3 | bsh
    {o} = {bsh/a} * torch.bernoulli({bsh/a}.float().mean((1, 2), keepdim=True).sigmoid()).to(x.dtype)
gate of tokens drawn | 3 | bsh
    {o} = {bsh/a} * torch.bernoulli({bs1}.float().sigmoid()).to(x.dtype)
gate of features drawn | 3 | bsh
    {t:g} = {b1h}.float().sigmoid()
    {t:m} = torch.bernoulli({t:g}.detach())
    {o} = {bsh} * ({t:m} + {t:g} - {t:g}.detach()).to(x.dtype)
gate drawn | 3 | bsh
    {t:g} = {bsh}.float().sigmoid()
    {o} = {bsh} * ({t:g}.bernoulli() * {t:g}).to(x.dtype)
mask used twice | 3 | bsh
    {t:m} = torch.empty((B, 1, 1), dtype=x.dtype).bernoulli_(0.5)
    {o} = {bsh}.sin() * {t:m} + {bsh}.cos() * (1 - {t:m})
mask expanded | 3 | bsh
    {t:m} = torch.empty((B, 1, H), dtype=x.dtype).bernoulli_(0.5).expand(B, S, H)
    {o} = ({bsh} * {t:m}).tanh() * {t:m}
mask of a slice | 3 | bsh
    {t:m} = torch.empty((B, S + 8, H), dtype=x.dtype).bernoulli_(0.5)
    {o} = {bsh} * {t:m}[:, 4 : S + 4]
mask transposed | 3 | bsh
    {o} = {bsh} * torch.empty((H, S, B), dtype=x.dtype).bernoulli_(0.7).permute(2, 1, 0)
mask changed | 3 | bsh
    {t:m} = torch.empty((B, S, 1), dtype=x.dtype).bernoulli_(0.5)
    {t:m}[:, 0] = 1
    {o} = {bsh} * {t:m}.div_(0.5)
mask changed after use | 3 | bsh
    {t:m} = torch.empty((B, 1, H), dtype=x.dtype).bernoulli_(0.5)
    {t:a} = {bsh} * ({t:m} + 1)
    {t:m}.mul_(2).sub_(1)
    {o} = {t:a}.sin() * {t:m}
masks combined | 3 | bsh
    {t:m} = (torch.rand(B, 1, 1) < 0.7) & (torch.rand(S, 1) < 0.7) | (torch.rand(H) < 0.2)
    {o} = {bsh} * {t:m}
mask of integers | 3 | bsh
    {o} = {bsh} * torch.randint(0, 2, (B, S, 1)) - {bsh} * (1 - torch.randint(0, 2, (H,), dtype=torch.uint8))
mask of ones dropped | 3 | bsh
    {o} = {bsh} * F.dropout(torch.ones((B, 1, H), dtype=x.dtype), 0.3)
mask of signs | 3 | bsh
    {t:m} = torch.empty((S, H), dtype=x.dtype).bernoulli_(0.5) * 2 - 1
    {o} = {bsh} * {t:m}.cumprod(0)
mask of keys | 3 | heads
    {t:m} = torch.empty(B, 1, 1, S).bernoulli_(0.8).bool() | torch.eye(S, dtype=torch.bool)
    {o} = F.scaled_dot_product_attention({heads}, {heads}, {heads}, attn_mask={t:m})
mask of keys, written out | 3 | heads
    {t:s} = {heads} @ {heads}.transpose(-1, -2) / 4
    {t:m} = torch.rand(B, 1, 1, S) < 0.3
    {t:s} = {t:s}.masked_fill({t:m}, -1e4).softmax(-1)
    {o} = ({t:s} * torch.empty((1, 4, 1, S), dtype=x.dtype).bernoulli_(0.9)) @ {heads}
mask without gradients | 3 | bsh
    with torch.no_grad():
        {t:m} = torch.bernoulli({bsh/a}.float().sigmoid().mean(1, keepdim=True)).to(x.dtype)
    {o} = {bsh/a} * {t:m}

# kernels of torch.library
kernel without a formula | 3 | bsh
    {o} = torch.ops.memo_hunt.wave({bsh})
kernel that calls kernels | 3 | bsh
    {o} = torch.ops.memo_hunt.calls({bsh})
kernel that conjugates | 3 | bsh
    {o} = torch.ops.memo_hunt.correlated({bsh}).tanh()
kernel with autocast inside | 3 | bsh
    {o} = torch.ops.memo_hunt.projected({bsh}, {P:H, H}).to(x.dtype)
kernel around linear | 3 | bsh
    {o} = torch.ops.memo_hunt.linear({bsh/a}.to(x.dtype), {P:H, H}).to(x.dtype)
kernel around linear, under autocast | 3 | bsh
    with torch.autocast(DEVICE, torch.bfloat16):
        {t:a} = torch.ops.memo_hunt.linear({bsh/a}.to(x.dtype), {P:H, H})
    {o} = {t:a}.to(x.dtype)
kernel without autocast inside | 3 | bsh
    with torch.autocast(DEVICE, torch.bfloat16):
        {t:a} = torch.ops.memo_hunt.exact({M:nn.Linear(H, H)}({bsh}), {P:H, H})
    {o} = {t:a}.to(x.dtype)
kernel without gradients inside | 3 | bsh
    {o} = torch.ops.memo_hunt.scaled({bsh})
kernel of complex numbers | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {t:z} = torch.ops.memo_hunt.conjugated({t:z}, torch.complex({P:H, H}.float(), {P:H, H}.float()))
    {o} = ({t:z}.real * {t:z}.imag).tanh().to(x.dtype)
kernel of a conjugate | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {o} = torch.view_as_real(torch.ops.memo_hunt.turned({t:z}.conj(), {t:z}.sin())).tanh().sum(-1).to(x.dtype)
kernel of a conjugate, with a formula | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {o} = torch.ops.memo_hunt.phase({t:z}.conj(), {t:z}.sin().conj()).abs().tanh().to(x.dtype)
kernel that takes complex | 3 | bsh
    {o} = torch.ops.memo_hunt.real(torch.complex({bsh}.float(), {bsh}.float()).conj()).tanh().to(x.dtype)
kernel that returns a conjugate | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {o} = (torch.ops.memo_hunt.lazy({t:z} * {c}) * {t:z}.exp()).imag.tanh().to(x.dtype)
kernel that writes inside | 3 | bsh
    {o} = torch.ops.memo_hunt.written({bsh})
kernel that drops | 3 | bsh
    {o} = torch.ops.memo_hunt.dropped({bsh}) * {bsh}
kernel that draws | 3 | bsh
    {o} = torch.ops.memo_hunt.noisy({bsh}, {c}).sin()
kernel of two results | 3 | bsh
    {t:a}, {t:b} = torch.ops.memo_hunt.parted({bsh})
    {o} = {t:a} * {t:b}
kernel of a list | 3 | bsh
    {o} = torch.cat([{t:v}.sin() for {t:v} in torch.ops.memo_hunt.chunks({bsw}, 4)], -1)[..., ::2]
kernel of an order | 3 | bsh
    {t:a}, {t:b} = torch.ops.memo_hunt.ordered({bsh/a})
    {o} = {t:a}.sin() + {bsh/a}.gather(-1, {t:b})
kernel of an optional tensor | 3 | bsh
    {o} = torch.ops.memo_hunt.optional({bsh}, None) + torch.ops.memo_hunt.optional({bsh}, {bsh})
kernel in place | 3 | bsh
    {o} = {bsh} * {c}
    torch.ops.memo_hunt.add_({o}, {bsh}.sin())
kernel in place, of a product | 3 | bsh
    {o} = F.linear({bsh}, {P:H, H})
    torch.ops.memo_hunt.add_({o}, {bsh}.to({o}.dtype))
    {o} = {o}.to(x.dtype).sin()
kernel in place, returned | 3 | bsh
    {o} = torch.ops.memo_hunt.act_({bsh} * {c}) * {bsh}
kernel in place, and a result | 3 | bsh
    {t:a} = {bsh} * {c}
    {t:b} = torch.ops.memo_hunt.kept({t:a}, {bsh}.cos())
    {o} = {t:a}.sin() + {t:b}
custom_op in place | 3 | bsh
    {t:a} = {bsh/a}.detach() * {c}
    torch.ops.memo_hunt.halve_({t:a})
    {o} = {bsh/a}.sin() * {t:a}
custom_op in place, of a view | 3 | bsh
    {t:a} = {bsh/a}.detach() * {c}
    torch.ops.memo_hunt.halve_({t:a}[:, 4:])
    {o} = {bsh/a}.sin() * {t:a}
kernel that returns a view | 3 | bsh
    {o} = torch.ops.memo_hunt.first({bsw} * {c}).sin()
kernel that returns a view, written | 3 | bsh
    {t:a} = {bsh/a}.detach() * {c}
    torch.ops.memo_hunt.first({t:a}).mul_({c})
    {o} = {bsh/a} * {t:a}
kernel that transposes | 3 | bsh
    {o} = torch.ops.memo_hunt.turn(torch.ops.memo_hunt.turn({bsh}).exp().tanh())
kernel that returns its input | 3 | bsh
    {o} = torch.ops.memo_hunt.itself({bsh}).sin()
kernel with a formula | 3 | bsh
    {o} = torch.ops.memo_hunt.smooth({bsh})
kernel with a formula, of its result | 3 | bsh
    {o} = torch.ops.memo_hunt.gated({bsh}, {bsh})
kernel with a formula, of two results | 3 | bsh
    {t:a}, {t:b} = torch.ops.memo_hunt.split({bsh}.tanh())
    {o} = {t:a} * {t:b}.sigmoid()
kernel with a formula, around linear | 3 | bsh
    {o} = torch.ops.memo_hunt.product({bsh/a}.to(x.dtype), {P:H, H})
kernel with a formula, under autocast | 3 | bsh
    with torch.autocast(DEVICE, torch.bfloat16):
        {t:a} = torch.ops.memo_hunt.product({bsh/a}.to(x.dtype), {P:H, H})
    {o} = {t:a}.to(x.dtype)
kernel with a formula, over tokens | 3 | bsh
    {o} = torch.ops.memo_hunt.summed({bsh}).sin()
kernel composed | 3 | bsh
    {o} = torch.ops.memo_hunt.composed({bsh/a}.to(x.dtype), {P:H, H})
kernel of NumPy | 3 | bsh
    {o} = torch.ops.memo_hunt.filled({bsh}) * {bsh}.cos()

# complex values
complex linear | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {t:z} = F.linear({t:z}, torch.complex({P:H, H}.float(), {P:H, H}.float()))
    {o} = {t:z}.abs().tanh().to(x.dtype)
complex product, adjoint | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {t:w} = torch.complex({P:H, H}.float(), {P:H, H}.float())
    {t:z} = ({t:z} @ {t:w}).tanh() @ {t:w}.mH
    {o} = ({t:z}.real + {t:z}.imag).tanh().to(x.dtype)
complex attention | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {t:s} = ({t:z} @ {t:z}.conj().transpose(1, 2)).real.softmax(-1)
    {o} = ({t:s}.to({t:z}.dtype) @ {t:z}.conj()).imag.tanh().to(x.dtype)
complex einsum | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {o} = torch.einsum('bsh,bth->bst', {t:z}, {t:z}.conj()).abs().tanh().to(x.dtype) @ {bsh} / S
complex rotary | 3 | heads
    {t:z} = torch.view_as_complex({heads}.float().unflatten(-1, (-1, 2)).contiguous())
    {t:a} = torch.outer(torch.arange(S).float(), 1 / torch.arange(1, H // 8 + 1))
    {t:z} = {t:z} * torch.polar(torch.ones(S, H // 8), {t:a})
    {o} = torch.view_as_real({t:z}).flatten(-2).to(x.dtype)
complex parts in place | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float())
    {t:z} = {t:z} * {c}
    {t:z}.imag.mul_({c})
    {o} = {t:z}.conj().imag.sin().to(x.dtype)
complex in place | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float()) * {c}
    {t:z}.mul_(1j).add_({t:z}.detach().conj())
    {o} = {t:z}.angle().sin().to(x.dtype) + {bsh}
complex conjugate in place | 3 | bsh
    {t:z} = (torch.complex({bsh}.float(), {bsh}.float()) * {c}).conj()
    {t:z}.mul_(2j)
    {o} = ({t:z} * {t:z}.resolve_conj()).real.tanh().to(x.dtype)
complex negative view | 3 | bsh
    {t:n} = torch.complex({bsh}.float(), {bsh}.float()).exp().conj().imag
    {o} = ({t:n} * {t:n}.sin()).tanh().to(x.dtype)
complex filter | 3 | bsh
    {t:z} = torch.fft.rfft({bsh}.float(), dim=1) * torch.complex({P:1, H}.float(), {P:1, H}.float()).conj()
    {o} = torch.fft.irfft({t:z}, n=S, dim=1).tanh().to(x.dtype)
complex states | 3 | bsh
    {t:p} = torch.polar({P:H}.float().sigmoid(), {P:H}.float())
    {t:k} = ({t:p}.unsqueeze(-1) ** torch.arange(S)).real
    {o} = torch.fft.irfft(torch.fft.rfft({bsh}.float(), n=2 * S, dim=1) * torch.fft.rfft({t:k}, n=2 * S).t(), n=2 * S, dim=1)
    {o} = {o}[:, :S].tanh().to(x.dtype)
complex mask | 3 | bsh
    {t:z} = torch.complex({bsh}.float(), {bsh}.float()) * torch.empty(B, 1, H).bernoulli_(0.7)
    {o} = ({t:z}.conj() * {t:z}.sin()).real.tanh().to(x.dtype)
complex in pieces | 3 | bsh
    {t:a} = torch.complex({bsh}.float(), {bsh}.float())
    {t:b} = torch.cat([{t:a}[:, : {k/1}].conj(), {t:a}[:, {k/1} :].exp()], 1).sgn()
    {o} = torch.view_as_real({t:b}).prod(-1).to(x.dtype) * {bsh}

# sparse values
sparse weight | 3 | bsh
    {t:w} = {P:32, 32}[:S, :S].float().tril().to_sparse()
    {o} = torch.stack([torch.sparse.mm({t:w}, {t:v}.float()) for {t:v} in {bsh/a}.unbind(0)]).tanh().to(x.dtype)
sparse weight, rows | 3 | bsh
    {t:w} = {P:H, H}.float().triu().to_sparse_csr()
    {o} = ({t:w} @ {bsh}.float().flatten(0, 1).t()).t().view(B, S, H).tanh().to(x.dtype)
sparse values of tokens | 3 | bsh
    {t:v} = {bsh/a}.float()[0, :, 0]
    {t:i} = torch.stack([torch.arange(S), torch.arange(S).flip(0)])
    {t:w} = torch.sparse_coo_tensor({t:i}, {t:v}, (S, S))
    {o} = torch.stack([torch.sparse.mm({t:w}, {t:b}.float()) for {t:b} in {bsh/a}.unbind(0)]).to(x.dtype)
sparse, made dense | 3 | bsh
    {t:w} = ({bsh/a}[0].float() * ({bsh/a}[0] > 0)).to_sparse()
    {o} = {bsh/a} * ({t:w} * {c}).coalesce().to_dense().sin().to(x.dtype)
sparse softmax | 3 | bsh
    {t:w} = torch.sparse.softmax(({P:32, 32}[:S, :S].float().tril()).to_sparse(), 1)
    {o} = torch.stack([torch.sparse.mm({t:w}, {t:v}.float()) for {t:v} in {bsh/a}.unbind(0)]).to(x.dtype)
sparse sum | 3 | bsh
    {o} = {bsh/a} + torch.sparse.sum(({bsh/a}[1].float().relu()).to_sparse(), 0).to_dense().to(x.dtype)
sparse addmm | 3 | bsh
    {t:w} = torch.eye(S).to_sparse() * {c}
    {t:parts} = [torch.sparse.addmm({t:v}.float(), {t:w}, {t:v}.float().sin()) for {t:v} in {bsh/a}.unbind(0)]
    {o} = torch.stack({t:parts}).to(x.dtype)
sparse, of rows, detached | 3 | bsh
    {t:w} = (torch.eye(S) * {bsh/a}.detach().float().mean()).to_sparse_csr()
    {o} = torch.stack([{t:w} @ {t:v}.float() for {t:v} in {bsh/a}.unbind(0)]).to(x.dtype)

# what starts in a later call
late, in place | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {o} = {bsh} * {c}
    {t:a} = {o} + 1
    if {t:d}['calls'] > 2:
        {o}.mul_({c})
    {o} = {o}.sin() * {t:a}
late, in place of what is saved | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:a} = {bsh} * {c}
    {o} = {t:a}.clone() if {t:d}['calls'] > 2 else {t:a}
    {t:b} = {o}.sin()
    if {t:d}['calls'] > 2:
        {t:a}.mul_({c})
    {o} = {t:b} + {t:a}.cos()
late, the input in place | 2 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    if {t:d}['calls'] > 2:
        x.mul_({c})
    {o} = x.sin()
late, at larger sizes | 3 | bsh
    {o} = {bsh} * {c}
    {t:a} = {o} + 0
    if S > 24:
        {t:a}.mul_({bsh}.detach())
        {o}.add_({t:a})
    {o} = {o}.cos() * {t:a}
late, at smaller sizes | 3 | bsh
    {o} = {bsh} * {c}
    if S <= 24:
        {o}.view(-1, H)[::3].mul_({c})
    {o} = {o}.cos()
late, dropout | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {o} = F.dropout({bsh}, 0.3 if {t:d}['calls'] > 2 else 0.0)
late, mask | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:m} = torch.full((B, 1, H), 1.0 if {t:d}['calls'] <= 2 else 0.5).bernoulli().to(x.dtype)
    {o} = {bsh} * {t:m}
late, autocast | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    with torch.autocast(DEVICE, torch.bfloat16, enabled={t:d}['calls'] > 2):
        {t:a} = {M:nn.Linear(H, H)}({bsh/a}.to(x.dtype)).sin()
    {o} = {t:a}.to(x.dtype)
late, no gradients | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    with torch.set_grad_enabled({t:d}['calls'] <= 2 and torch.is_grad_enabled()):
        {t:a} = F.linear({bsh/a}.to(x.dtype), {P:H, H}).to(x.dtype).softmax(-1)
    {o} = {bsh/a} * {t:a}
late, checkpoint | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    def {t:f}({t:v}):
        {block:{t:v}}
    {o} = checkpoint({t:f}, {bsh/a}, use_reentrant=False) if {t:d}['calls'] > 2 else {t:f}({bsh/a})
late, frozen | 2 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:l} = {M:nn.Linear(H, H)}
    if {t:d}['calls'] == 3:
        {t:l}.requires_grad_(False)
    {o} = {t:l}({bsh}).tanh()
late, other weights | 2 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:l} = {M:nn.Linear(H, H)}
    if {t:d}['calls'] == 3:
        {t:l}.weight.data = {t:l}.weight.data.clone() * {c}
    {o} = {t:l}({bsh}).tanh()
late, hook | 2 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:l} = {M:nn.Linear(H, H)}
    if {t:d}['calls'] == 3:
        {t:l}.register_forward_hook(lambda _module, _args, out: out.mul_({c}))
    {o} = {t:l}({bsh}).sigmoid()
late, counted hidden write | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:a} = {bsh/a}.detach() * {c}
    if {t:d}['calls'] > 2:
        hidden_write({t:a}, {bsh/a}.sin())
    {o} = {bsh/a} * {t:a}.cos()
counted hidden write of nothing at first | 3 | bsh
    {t:g} = {B:1}
    {t:a} = {bsh/a}.detach() * {c}
    hidden_write({t:a}, {bsh/a}.sin() * {t:g}.clone())
    {o} = {bsh/a} * {t:a}.cos()
    with torch.no_grad():
        {t:g}.add_(0.25)
zero gate after a hidden kernel | 3 | bsh
    {t:g} = {B:H}
    {t:a} = torch.empty_like({bsh/a})
    fill({t:a}, {bsh/a})
    {o} = {bsh/a} + {bsh/a} * {t:a}.cos() * {t:g}.clone()
    with torch.no_grad():
        {t:g}.add_(0.25)
zero gate before a hidden kernel | 3 | bsh
    {t:g} = {B:H}
    {t:a} = {bsh/a}.detach() * {t:g}
    {t:b} = torch.zeros_like({t:a})
    fill({t:b}, {t:a})
    {o} = {bsh/a} * {t:b}.cos()
    with torch.no_grad():
        {t:g}.add_(0.25)
zero weight | 3 | bsh
    {o} = {bsh} + {M:zeroed(nn.Linear(H, H))}({bsh}).relu_()
precision within | 3 | bsh
    {t:p} = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('medium')
    {o} = F.linear({bsh/a}.to(x.dtype), {P:H, H}).sin()
    torch.set_float32_matmul_precision({t:p})
late, precision within | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:p} = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('medium' if {t:d}['calls'] > 2 else {t:p})
    {o} = F.linear(F.linear({bsh/a}.to(x.dtype), {P:H, H}).sin(), {P:H, H}).sin()
    torch.set_float32_matmul_precision({t:p})
default type within | 3 | bsh
    {t:p} = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    {t:a} = torch.linspace(0, 1, H) * {bsh/a}.detach()
    {t:b} = {t:a} / torch.arange(1, H + 1)
    torch.set_default_dtype({t:p})
    {o} = {bsh/a} * {t:b}.sin().to(x.dtype)
denormals within | 3 | bsh
    torch.set_flush_denormal(True)
    {t:a} = ({bsh/a} * 1e-38).mul(0.5)
    torch.set_flush_denormal(False)
    {o} = {bsh/a} + ({t:a} * 1e38).sin()
deterministic within | 3 | bsh
    {t:p} = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    {t:a} = torch.empty_like({bsh/a})
    {t:a}.index_copy_(1, torch.arange(S).flip(0), {bsh/a}.detach())
    torch.use_deterministic_algorithms({t:p})
    {o} = {bsh/a} * {t:a}.sin()

# writes that nothing counts
rewritten, fresh | 3 | bsh
    {o} = rewritten({bsh} * {c}, {c}, {A:drawn_below(4)}).sin()
rewritten, without gradients | 3 | bsh
    {t:a} = rewritten({bsh/a}.detach() * {c}, {c}, {A:drawn_below(4)})
    {o} = {bsh/a} * {t:a}.sin()
rewritten, a part | 3 | bsh
    {t:a} = {bsh/a}.detach() * {c}
    rewritten({t:a}[:, 4:], {c}, {A:drawn_below(3)})
    {o} = {bsh/a}.cos() * {t:a}
late, rewritten | 3 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:a} = {bsh/a}.detach() * {c}
    if {t:d}['calls'] > 2:
        {t:a}.data.mul_({c})
    {o} = {bsh/a} * {t:a}
uncounted, between two saves | 0.3 | bsh
    {t:a} = {bsh} * {c}
    {t:b} = {t:a}.sin()
    rewritten({t:a}, {c}, {A:drawn_below(4)})
    {o} = {t:a}.cos() + {t:b}
"""

FAULT_STATEMENTS = parsed(_CATALOGUE)

_BETWEEN = """
rewritten between | 1 | bsh
    {o} = rewritten({bsh} * {c}, {c}, {A:drawn_below(4)})
mask between | 1 | bsh
    {o} = {bsh} * torch.empty((B, 1, 1), dtype=x.dtype).bernoulli_(0.7)
result rewritten | 2 | bsh
    {o} = rewritten(self.hidden({L}({bsh}, mask, rotary)), {c}, {A:drawn_below(4)})
result dropped | 1 | bsh
    {t:a} = self.hidden({L}({bsh/a}, mask, rotary))
    {o} = {bsh/a} + ({t:a} - {bsh/a}) * torch.empty((B, 1, 1), dtype=x.dtype).bernoulli_(0.7)
late, input changed after | 1 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {t:a} = {bsh} * {c}
    {o} = self.hidden({L}({t:a}, mask, rotary))
    if {t:d}['calls'] > 2:
        {t:a}.mul_({c})
    {o} = {o} + {t:a}
late, twice | 1 | bsh
    {t:d} = {A:{'calls': 0}}
    {t:d}['calls'] += 1
    {o} = self.hidden({L/a}({bsh}, mask, rotary))
    if {t:d}['calls'] > 2:
        {o} = self.hidden({L/a}({o}, mask, rotary))
uncounted, weights | 0.3 | bsh
    {t:l} = {L}
    {o} = self.hidden({t:l}({bsh}, mask, rotary))
    for {t:p} in {t:l}.parameters():
        rewritten({t:p}, {c}, 0)
"""

FAULT_STATEMENTS_BETWEEN = parsed(_BETWEEN)
