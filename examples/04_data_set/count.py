"""Counts the objects of each class in a data set: count.py ANNOTATIONS."""

import sys

from pycocotools.coco import COCO

data = COCO(sys.argv[1])
for category in data.loadCats(data.getCatIds()):
    print(category["name"], len(data.getAnnIds(catIds=category["id"])))
