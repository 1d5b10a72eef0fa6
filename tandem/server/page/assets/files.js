// Files that a message has.

export function toDataURL(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

export function fromDataURL(url) {
  const [head, data] = url.split(",", 2);
  return new Blob([Uint8Array.from(atob(data), (char) => char.charCodeAt(0))], { type: /^data:([^;]*)/.exec(head)[1] });
}
