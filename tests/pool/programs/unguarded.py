"""Would start itself again and again."""

import os

from outlive import Pool

pool = Pool(2, os.environ["METHOD"])
print(pool.submit(abs, -4).result())
