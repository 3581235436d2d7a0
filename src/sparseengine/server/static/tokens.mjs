// A tokenizer's vocabulary entries as text: byte-level alphabets (Ġ) and SentencePiece marks (▁).

function byteOf() {
  const found = new Map();
  let next = 256;
  for (let b = 0; b < 256; b++) {
    const isPlain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
    found.set(String.fromCodePoint(isPlain ? b : next++), b);
  }
  return found;
}

const BYTES = byteOf();

export function readable(tokens) {
  const isByteLevel = tokens.some((t) => t.includes("Ġ") || t.includes("Ċ"));
  return tokens.map((token) => {
    if (!isByteLevel) return token.replaceAll("▁", " ").replaceAll("<0x0A>", "\n");
    const bytes = [...token].map((c) => BYTES.get(c));
    if (bytes.includes(undefined)) return token;
    return new TextDecoder().decode(Uint8Array.from(bytes));
  });
}
