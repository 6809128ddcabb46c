// How numbers and foreign names are written; the same rules as memo/trace/format.py.

export function duration(ns: number): string {
  if (ns >= 119.995e9) {
    const seconds = Math.round(ns / 1e9);
    return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, "0")} s`;
  }
  if (ns >= 0.9995e9) return `${(ns / 1e9).toFixed(2)} s`;
  if (ns >= 9.95e6) return `${(ns / 1e6).toFixed(0)} ms`;
  if (ns >= 0.9995e6) return `${(ns / 1e6).toFixed(1)} ms`;
  return ns === 0 ? "0 s" : `${(ns / 1e3).toFixed(0)} µs`;
}

// A point in time: as many digits as the visible span makes useful.
export function instant(ns: number, span: number): string {
  const digits = Math.min(9, Math.max(0, 3 - Math.floor(Math.log10(Math.max(span, 1) / 1e9))));
  return `${(ns / 1e9).toFixed(digits)} s`;
}

export function bytes(nbytes: number): string {
  let value = Math.abs(nbytes);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024) return `${nbytes < 0 ? "-" : ""}${Number(value.toPrecision(4))} ${unit}`;
    value /= 1024;
  }
  return `${nbytes < 0 ? "-" : ""}${Number(value.toPrecision(4))} TiB`;
}

export function percent(value: number | null): string {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (size > 0 && size < 0.05) return "<0.1 %";
  return `${value.toFixed(size > 0 && size < 9.95 ? 1 : 0)} %`;
}

export function rate(bytesPerS: number | null): string {
  if (bytesPerS === null) return "–";
  if (bytesPerS < 1e6) return `${Number((bytesPerS / 1e3).toPrecision(3))} kB/s`;
  const [value, unit] = bytesPerS >= 1e9 ? [bytesPerS / 1e9, "GB/s"] : [bytesPerS / 1e6, "MB/s"];
  return `${Number(value.toPrecision(3))} ${unit}`;
}

const INERT = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

// Invisible and obeyed characters as escapes, and long names cut in their middle, between words.
export function printable(name: string, limit = 80): string {
  const characters = [...name];
  const head = Math.floor(((limit - 1) * 2) / 3);
  const begin = (): string => characters.slice(0, head).join("").replace(/(?<= )[^ ]{1,20}$/u, "");
  const end = (): string => characters.slice(-(limit - 1 - head)).join("").replace(/^[^ ]{1,20}(?= )/u, "");
  return (characters.length <= limit ? name : `${begin()}…${end()}`).replace(INERT, (char) => {
    const code = char.codePointAt(0) ?? 0;
    if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

export function count(value: number): string {
  return value.toLocaleString("en-US");
}
