"""Steps: how a program runs its model's forward and backward.

A step has the names model; given, its input; managed, which makes the context of a forward; note(name, tensor), which keeps
a copy for the comparison.
"""

from __future__ import annotations

from tests.hunt.operators import DEVICE
from tests.hunt.statements import parsed

_CATALOGUE = """
plain | 10 | -
    with managed():
        loss = model(given)
    note('loss', loss)
    loss.backward()
backward inside | 1 | -
    with managed():
        loss = model(given)
        loss.backward()
    note('loss', loss)
graph kept | 1 | -
    with managed():
        loss = model(given)
    loss.backward(retain_graph=True)
    note('first gradient', given.grad)
    loss.backward()
twice differentiated | 1 | -
    with managed():
        loss = model(given)
    (first,) = torch.autograd.grad(loss, given, create_graph=True)
    note('first gradient', first)
    (loss + first.square().sum()).backward()
twice differentiated inside | 1 | -
    with managed():
        loss = model(given)
        (first,) = torch.autograd.grad(loss, given, create_graph=True)
    (loss + first.square().sum()).backward()
split backward | 1 | -
    with managed():
        loss = model(given)
    (first,) = torch.autograd.grad(loss, given, retain_graph=True)
    note('first gradient', first)
    loss.backward()
accumulated | 1 | -
    for part in given.chunk(2):
        with managed():
            loss = model(part)
        note('loss of a part', loss)
        loss.backward(retain_graph=True)
first in, first out | 1 | -
    losses = []
    for factor in (1.0, 0.5):
        with managed():
            losses.append(model(given * factor))
    for loss in losses:
        loss.backward()
last in, first out | 1 | -
    losses = []
    for factor in (1.0, 0.5):
        with managed():
            losses.append(model(given * factor))
    while losses:
        losses.pop().backward()
two in one context | 1 | -
    with managed():
        first = model(given)
        second = model(given.flip(0))
    (first * second).backward()
one into the other | 1 | -
    with managed():
        first = model(given)
        second = model(given * first)
    second.backward()
dropped first | 1 | -
    with managed():
        loss = model(given)
    del loss
    with managed():
        loss = model(given)
    note('loss', loss)
    loss.backward()
half of a backward dropped | 1 | -
    with managed():
        loss = model(given)
    torch.autograd.grad(loss, model.start)
    with managed():
        loss = model(given)
    loss.backward()
evaluated between | 1 | -
    with managed():
        loss = model(given)
    model.eval()
    with torch.no_grad(), managed():
        note('evaluated', model(given))
    model.train()
    loss.backward()
evaluated | 1 | -
    with torch.inference_mode(), managed():
        note('evaluated', model(given.detach()))
    with managed():
        loss = model(given)
    loss.backward()
in a thread | 1 | -
    with managed():
        loss = model(given)
    in_a_thread(loss.backward)
of some inputs | 1 | -
    with managed():
        loss = model(given)
    loss.backward(inputs=[given, model.start])
not managed | 1 | -
    loss = model(given)
    loss.backward()
nested | 1 | -
    with managed(), managed():
        loss = model(given)
    loss.backward()
under autocast | 1 | -
    with managed(), torch.autocast(DEVICE, torch.bfloat16):
        loss = model(given)
    note('loss', loss)
    loss.backward()
checkpointed | 1 | -
    with managed():
        loss = around_layers(model, given)
    loss.backward()
stopped by an exception | 1 | -
    handle = model.layers[-1].register_forward_pre_hook(lambda module, args: 1 / 0)
    try:
        with managed():
            model(given)
    except ZeroDivisionError:
        pass
    handle.remove()
    with managed():
        loss = model(given)
    loss.backward()
given in place | 1 | -
    with managed():
        moved = given * 0.5
        loss = model(moved)
    moved.detach().add_(0)
    loss.backward()
hooks of the program's own | 1 | -
    with checked_saves():
        with managed():
            loss = model(given)
    loss.backward()
hooks within | 1 | -
    with managed(), checked_saves():
        loss = model(given)
    loss.backward()
"""

_ON_A_DEVICE = """
backward under the host's autocast | 2 | -
    with managed():
        loss = model(given)
    note('loss', loss)
    with torch.autocast('cpu', torch.bfloat16):
        loss.backward()
on a stream | 2 | -
    with beside(given):
        with managed():
            loss = model(given)
        loss.backward()
    note('loss', joined(loss))
forward on a stream | 2 | -
    with beside(given), managed():
        loss = model(given)
    joined(loss).backward()
backward on a stream | 2 | -
    with managed():
        loss = model(given)
    with beside(loss, stream=1):
        loss.backward()
microbatches on streams | 3 | -
    losses = []
    for number, part in enumerate(given.chunk(2)):
        with beside(part, stream=number), managed():
            losses.append(model(part))
    for number, loss in enumerate(losses):
        with beside(loss, stream=number):
            loss.backward()
        joined(loss)
"""

STEPS = parsed(_CATALOGUE) | (parsed(_ON_A_DEVICE) if DEVICE != "cpu" else {})
