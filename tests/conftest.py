"""One TensorFlow process for all tests: four logical CPU devices stand for replicas."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"
