// The message box: text, and files that are picked, pasted or dropped.

import { chip } from "./attachments.js";
import { $, h, iconButton, toast } from "./dom.js";
import { pagesAsImages, readFile } from "./files.js";
import { t } from "./i18n.js";

const MAX_FILES = 20; // of a message

export class Composer {
  constructor(host) {
    this.host = host; // { send(text, files), busy(), changed() }
    this.input = $("input");
    this.files = [];
    this.reading = 0; // files that are not read yet
    $("composer").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.input.addEventListener("input", () => this.update());
    this.input.addEventListener("keydown", (event) => {
      const byTouch = matchMedia("(pointer: coarse)").matches; // on touch screens, Enter starts a new line
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !byTouch) {
        event.preventDefault();
        this.submit();
      }
    });
    $("attach").addEventListener("click", () => $("pick").click());
    $("pick").addEventListener("change", () => {
      this.add($("pick").files);
      $("pick").value = "";
    });
    document.addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
    this.acceptDrops($("chat-view"));
  }

  acceptDrops(view) {
    const has = (event) => [...event.dataTransfer.types].includes("Files");
    const mark = (on) => view.classList.toggle("dropping", on);
    view.addEventListener("dragover", (event) => { if (has(event)) { event.preventDefault(); mark(true); } });
    view.addEventListener("dragleave", (event) => { if (!view.contains(event.relatedTarget)) mark(false); });
    view.addEventListener("drop", (event) => {
      mark(false);
      if (!has(event)) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  async add(files) {
    for (const file of [...files]) {
      if (this.files.length + this.reading >= MAX_FILES) return toast(t("A message has 20 files at most."));
      this.reading++;
      this.update();
      try {
        const read = await readFile(file);
        if (read.source && !read.text) await this.usePages(read); // a scan
        else this.files.push(read);
      } catch (error) {
        toast(error.message);
      }
      this.reading--;
      this.draw();
    }
    this.input.focus();
    return undefined;
  }

  /** Takes the pages of a PDF as images in place of its text. */
  async usePages(file) {
    const images = await pagesAsImages(file), at = this.files.indexOf(file);
    this.files.splice(at < 0 ? this.files.length : at, at < 0 ? 0 : 1, ...images);
    this.files.length = Math.min(this.files.length, MAX_FILES);
    this.draw();
  }

  draw() {
    $("files").replaceChildren(...this.files.map((file) => h("li", null, chip(file),
      file.source && h("button.plain", { type: "button", onclick: () => this.usePages(file).catch((error) => toast(error.message)) },
        t("as images")),
      iconButton("close", t("Remove {name}", { name: file.name }), () => {
        this.files = this.files.filter((other) => other !== file);
        this.draw();
        this.input.focus();
      }))));
    this.update();
  }

  update() {
    grow(this.input);
    $("files").hidden = !this.files.length;
    $("send").disabled = this.reading > 0 || (!this.input.value.trim() && !this.files.length);
    this.host.changed();
  }

  submit() {
    if ($("send").disabled || this.host.busy()) return;
    const text = this.input.value.trim(), files = this.files.map(({ source, ...file }) => file);
    this.input.value = "";
    this.files = [];
    this.draw();
    this.host.send(text, files);
  }
}

export function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}
