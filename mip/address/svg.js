"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const LEFT = 78, BOTTOM = 26, TOP = 8, RIGHT = 10;

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let u = 0;
  while (Math.abs(n) >= 1024 && u < 4) { n /= 1024; u++; }
  return `${u ? Number(n.toPrecision(5)) : Math.round(n)} ${units[u]}`;
}

function panel(arena) {
  const title = document.createElement("h1"), words = document.createElement("p");
  const canvas = document.createElement("canvas");
  title.textContent = arena.name;
  words.textContent = `${arena.title}. Wheel zooms (with shift: time only), drag pans, double click resets.`;
  document.getElementById("panels").append(title, words, canvas);
  const boxes = arena.boxes;
  let t0 = Infinity, t1 = -Infinity;
  for (const b of boxes) { t0 = Math.min(t0, b[0]); t1 = Math.max(t1, b[1]); }
  if (!(t0 < t1)) { t0 = 0; t1 = 1; }
  const whole = { x: t0, y: 0, w: t1 - t0, h: Math.max(arena.nbytes, arena.bound, 1) * 1.03 };
  let view = { ...whole }, drag = null;
  const size = () => ({ w: canvas.clientWidth - LEFT - RIGHT, h: canvas.clientHeight - TOP - BOTTOM });
  const px = t => LEFT + (t - view.x) / view.w * size().w;
  const py = a => TOP + (1 - (a - view.y) / view.h) * size().h;

  function line(context, at, colour, text, dash) {
    const y = py(at);
    context.setLineDash(dash); context.strokeStyle = colour; context.lineWidth = 1.5;
    context.beginPath(); context.moveTo(LEFT, y); context.lineTo(LEFT + size().w, y); context.stroke();
    context.setLineDash([]); context.fillStyle = colour; context.textAlign = "right";
    context.fillText(text, LEFT + size().w - 4, y + (dash.length ? 14 : -4));
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1, s = size();
    canvas.width = canvas.clientWidth * ratio; canvas.height = canvas.clientHeight * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const ink = getComputedStyle(document.body).color;
    context.font = "12px system-ui,sans-serif";
    context.save();
    context.beginPath(); context.rect(LEFT, TOP, s.w, s.h); context.clip();
    for (const [a, b, low, n, colour] of boxes) {
      if (b < view.x || a > view.x + view.w || low + n < view.y || low > view.y + view.h) continue;
      const x = px(a), y = py(low + n), w = Math.max(px(b) - x, 0.5), h = Math.max(py(low) - y, 0.5);
      context.fillStyle = data.colours[colour];
      context.fillRect(x, y, w, h);
      if (w > 4 && h > 4) { context.strokeStyle = "#0006"; context.lineWidth = 0.5; context.strokeRect(x, y, w, h); }
    }
    line(context, arena.nbytes, ink, `arena ${bytes(arena.nbytes)}`, []);
    line(context, arena.bound, "#d22", `lower bound ${bytes(arena.bound)}`, [6, 4]);
    context.restore();
    context.fillStyle = ink; context.strokeStyle = ink; context.lineWidth = 1;
    context.strokeRect(LEFT, TOP, s.w, s.h);
    for (let k = 0; k <= 6; k++) {
      context.textAlign = "right"; context.fillText(bytes(view.y + view.h * k / 6), LEFT - 6, TOP + s.h * (1 - k / 6) + 4);
      context.textAlign = k === 6 ? "right" : "center";
      context.fillText(String(Math.round(view.x + view.w * k / 6)), LEFT + s.w * k / 6, TOP + s.h + 18);
    }
  }

  const at = e => {
    const box = canvas.getBoundingClientRect(), s = size();
    return { t: view.x + (e.clientX - box.left - LEFT) / s.w * view.w,
             a: view.y + (1 - (e.clientY - box.top - TOP) / s.h) * view.h };
  };
  canvas.addEventListener("wheel", e => {
    e.preventDefault();
    const p = at(e), f = Math.exp(e.deltaY * 0.0015);
    view.x = p.t - (p.t - view.x) * f; view.w *= f;
    if (!e.shiftKey) { view.y = p.a - (p.a - view.y) * f; view.h *= f; }
    draw();
  }, { passive: false });
  canvas.addEventListener("pointerdown", e => { drag = at(e); canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("dblclick", () => { view = { ...whole }; draw(); });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointermove", e => {
    const p = at(e);
    if (drag) { view.x += drag.t - p.t; view.y += drag.a - p.a; tip.hidden = true; draw(); return; }
    const hit = boxes.find(b => b[0] <= p.t && p.t < b[1] && b[2] <= p.a && p.a < b[2] + b[3]);
    tip.hidden = !hit;
    if (!hit) return;
    tip.textContent = `${hit[5]}\n${bytes(hit[3])} at ${hit[2]}\nlive [${hit[0]}, ${hit[1]})`;
    tip.style.left = `${Math.min(e.clientX + 14, window.innerWidth - 260)}px`;
    tip.style.top = `${e.clientY + 14}px`;
  });
  window.addEventListener("resize", draw);
  draw();
}

data.arenas.forEach(panel);
