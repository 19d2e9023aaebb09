"""A program with two loaders at once, one of which fetches from a server of its own; it writes into a folder.

Reads   its argument: a folder.
Writes  a file there; it goes on where that cannot be written.
Never   outlive.
"""

import http.server
import os
import sys
import threading
import time
import urllib.request

from torch.utils.data import DataLoader, Dataset


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.path)))
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *args):
        pass


class Numbers(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        time.sleep(0.02)  # what a store takes to answer
        return index


class Remote(Numbers):
    def __init__(self, port):
        self.port = port

    def __getitem__(self, index):
        time.sleep(0.02)  # what a store takes to answer
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{index}") as answer:
            return int(answer.read()[1:])


def main(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = DataLoader(Remote(server.server_port), batch_size=4, num_workers=1)
    numbers = DataLoader(Numbers(), batch_size=4, num_workers=1)
    both = [threading.Thread(target=list, args=(iter(loader),)) for loader in (remote, numbers)]
    for thread in both:  # so that neither waits for the other
        thread.start()
    for thread in both:
        thread.join()
    os.makedirs(folder, exist_ok=True)
    try:
        with open(os.path.join(folder, "checkpoint"), "wb") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        print(error)
    else:
        os.unlink(file.name)


if __name__ == "__main__":
    main(sys.argv[1])
