//! Copies from a device to the host.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::server::{Handle, ServerError};
use farflung_base::{Pending, PendingOp};

use super::error_message;
use crate::backend::Downloaded;
use crate::{Result, TensorError};

type Read = dyn Future<Output = std::result::Result<Vec<Bytes>, ServerError>> + Send;

/// A queued read. It returns the bytes as they are after all ops queued before it.
pub(super) struct Download {
    device: String,
    read: Pin<Box<Read>>,
    /// Requested bytes within the whole words that are read.
    range: Range<usize>,
}

struct Words(Bytes, Range<usize>);

impl Downloaded for Words {
    fn bytes(&self) -> &[u8] {
        &self.0[self.1.clone()]
    }
}

impl Download {
    /// Queues a read of `buffer`, which consists of whole words, and returns its bytes in `range`.
    pub(super) fn start(
        device: &str,
        client: &Client,
        buffer: Handle,
        range: Range<usize>,
    ) -> Pending<Result<Box<dyn Downloaded>>> {
        let client = client.clone();
        let read = Box::pin(async move { client.read_async(vec![buffer]).await });
        let mut download = Self { device: device.to_owned(), read, range };
        // The first poll queues the read.
        match download.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(read) => Pending::ready(read),
            Poll::Pending => Pending::new(download),
        }
    }

    fn done(&self, read: std::result::Result<Vec<Bytes>, ServerError>) -> Result<Box<dyn Downloaded>> {
        let failed = |reason| TensorError::Device { device: self.device.clone(), op: "download", reason };
        let words = read
            .map_err(|e| failed(error_message(&e)))?
            .pop()
            .unwrap_or_else(|| Bytes::from_bytes_vec(Vec::new()));
        if words.len() < self.range.end {
            return Err(failed(format!(
                "received {} bytes, expected at least {}",
                words.len(),
                self.range.end
            )));
        }
        Ok(Box::new(Words(words, self.range.clone())))
    }
}

impl PendingOp<Result<Box<dyn Downloaded>>> for Download {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Box<dyn Downloaded>>> {
        self.read.as_mut().poll(cx).map(|read| self.done(read))
    }

    fn wait(mut self: Box<Self>) -> Result<Box<dyn Downloaded>> {
        let read = cubecl::future::block_on(self.read.as_mut());
        self.done(read)
    }
}
