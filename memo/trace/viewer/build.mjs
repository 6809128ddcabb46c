// Bundles src/ and the pinned d3 modules into ../assets: a script, a style sheet and LICENSES.txt.
// The result is committed, so that nobody needs Node.js to install or run memo; `npm ci && npm run build` remakes it,
// byte for byte (a test compares).

import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const assets = process.argv[2] ?? join(here, "..", "assets");

// d3-selection's html() is the one place that would parse markup. The viewer never calls it; here it becomes text, so
// that no assignment to innerHTML exists in the page at all.
const inertHtml = {
  name: "inert-html",
  setup(bundle) {
    bundle.onLoad({ filter: /d3-selection\.mjs$/ }, ({ path }) => {
      const source = readFileSync(path, "utf8");
      const contents = source.replaceAll(/\.innerHTML\b/g, ".textContent");
      if (contents === source) throw new Error("d3-selection no longer has innerHTML: drop this plugin");
      return { contents, loader: "js" };
    });
  },
};

const result = await build({
  absWorkingDir: here,
  entryPoints: { viewer: "src/main.ts" },
  outdir: assets,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "ascii",
  legalComments: "none",
  metafile: true,
  plugins: [inertHtml],
});

await build({
  absWorkingDir: here,
  entryPoints: { viewer: "src/viewer.css" },
  outdir: assets,
  bundle: true,
  minify: true,
  charset: "ascii",
});

const packages = new Set();
for (const input of Object.keys(result.metafile.inputs)) {
  const found = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
  if (found) packages.add(found[1]);
}
const texts = [...packages].sort().map((name) => {
  const folder = join(here, "node_modules", name);
  const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  return `${name} ${version}\n\n${readFileSync(join(folder, "LICENSE"), "utf8").trim()}\n`;
});
const rule = `\n${"-".repeat(80)}\n\n`;
writeFileSync(
  join(assets, "LICENSES.txt"),
  `The page that memo writes contains code of these packages.\n${rule}${texts.join(rule)}`,
);
