// A page that is opened from a disk may start no Worker: its search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>postMessage = data => frameElement.answered(structuredClone(data))</script><script src="${address}"></script>`;
      this.frame.answered = (data) => this.onmessage?.({ data });
      this.loaded = new Promise((resolve) => (this.frame.onload = resolve));
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow?.onmessage({ data: structuredClone(data) }));
    }

    terminate() {
      this.frame.remove();
    }
  };
