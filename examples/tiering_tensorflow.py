"""A plain TensorFlow program that reads files with tf.data; it knows nothing of Stoker.

    python examples/tiering_tensorflow.py /mnt/nfs/train
    stoker run --source /mnt/nfs/train --tier /nvme/stoker:100GiB -- \
        python examples/tiering_tensorflow.py /mnt/nfs/train

Trains a small network to tell how bright a sample is, for some epochs; prints for each the samples,
the bytes, and the seconds it took. Files that end in .tfrecord hold many samples, any other is one.
"""

import argparse
import time
from pathlib import Path

import tensorflow as tf

_SEEN = 4096  # bytes of a sample that the network looks at


def parse(data):
    """Return what the network sees of a sample, and the sample's bytes."""
    seen = tf.io.decode_raw(tf.strings.substr(data, 0, _SEEN), tf.uint8)
    seen = tf.pad(seen, [[0, _SEEN - tf.shape(seen)[0]]])
    return tf.cast(tf.ensure_shape(seen, [_SEEN]), tf.float32) / 255, tf.strings.length(data)


def samples(folder, parallel):
    """Return a tf.data pipeline of all samples, in an order of its own each epoch."""
    paths = sorted(str(p) for p in Path(folder).rglob("*") if p.is_file())
    files = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths))
    if paths[0].endswith(".tfrecord"):
        found = files.interleave(
            tf.data.TFRecordDataset, cycle_length=parallel, num_parallel_calls=parallel
        ).map(parse, num_parallel_calls=parallel)
    else:
        found = files.map(lambda path: parse(tf.io.read_file(path)), num_parallel_calls=parallel)
    options = tf.data.Options()
    # A read takes up a thread; by default there are no more of them than processors. And what is
    # chosen here stays: left to itself, tf.data reads file after file in some epochs.
    options.threading.private_threadpool_size = parallel
    options.autotune.enabled = False
    return found.with_options(options)


def main():
    """Train on the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    data = samples(args.folder, args.workers).batch(args.batch).prefetch(2)
    network = tf.keras.Sequential(
        [tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(1)]
    )
    optimiser = tf.keras.optimizers.SGD(1e-3)

    @tf.function
    def step(inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((network(inputs)[:, 0] - tf.reduce_mean(inputs, 1)) ** 2)
        weights = network.trainable_variables
        optimiser.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    network.build((None, _SEEN))
    optimiser.build(network.trainable_variables)
    for epoch in range(1, args.epochs + 1):
        began, count, total = time.perf_counter(), 0, 0
        for inputs, lengths in data:
            step(inputs)
            count, total = count + len(lengths), total + int(tf.reduce_sum(lengths))
        seconds = time.perf_counter() - began
        print(f"epoch {epoch}: {count} samples, sum {total}, {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
