// Images that the user attaches: read here, sent as data URLs, shown through blob URLs.

import { el, iconButton, toast } from "../common/dom.js";

const MAX_BYTES = 8 << 20;
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** A data URL, or null after telling the user why not. */
export async function readImage(file) {
  if (!TYPES.includes(file.type)) { toast(`${file.name}: not a PNG, JPEG, WebP or GIF image.`, "bad"); return null; }
  if (file.size > MAX_BYTES) { toast(`${file.name}: larger than 8 MB.`, "bad"); return null; }
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function blobUrl(dataUrl) {
  const [head, data] = dataUrl.split(",", 2);
  const type = /^data:([a-z/+.-]+);base64$/.exec(head)?.[1];
  if (!TYPES.includes(type)) return null;
  return URL.createObjectURL(new Blob([Uint8Array.from(atob(data), letter => letter.charCodeAt(0))], { type }));
}

export function thumbnail(dataUrl, onRemove) {
  const url = blobUrl(dataUrl);
  if (!url) return el("span", { class: "soft" }, "An image that cannot be shown");
  const image = el("img", { src: url, alt: "Attached image", on: { load: () => URL.revokeObjectURL(url) } });
  return el("span", { class: "thumbnail" }, image, onRemove ? iconButton("close", "Remove this image", onRemove) : null);
}
