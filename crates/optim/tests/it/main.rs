//! Integration tests of this crate. They are one program, since each test program links all crates again.

mod apart;
mod asynchronous;
mod average;
mod buffers;
mod chain;
mod delayed;
mod density;
mod des_loc;
mod device;
mod forms;
mod gossip;
mod halos;
mod local;
mod model_average;
mod momentum_averages;
mod onebit_lamb;
mod restore;
mod rounds;
mod shards;
mod signs;
mod small_chain;
mod stored;
mod synchronise;
mod too_large;
mod trajectories;
mod zero_one;

use farflung_optim as optim;
use farflung_tensor as tensor;
