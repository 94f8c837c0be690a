//! Devices by name: parsing of names, listing of the devices of this machine, and the reason if a kind is
//! missing.

use std::fmt;
use std::str::FromStr;

use crate::{Device, Result, TensorError};

/// Name of a device: `auto`, `cpu`, `wgpu`, `wgpu:1`, `cuda`, `cuda:1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceName {
    /// The first CUDA device, else the first GPU of wgpu, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An adapter of Vulkan, Metal or DirectX 12, by its index in [`Device::list`].
    Wgpu(usize),
    /// An NVIDIA GPU, by its CUDA index.
    Cuda(usize),
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Wgpu(n) => write!(f, "wgpu:{n}"),
            Self::Cuda(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = TensorError;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, index) = match text.split_once(':') {
            Some((kind, index)) => (kind, index.parse().ok()),
            None => (text, Some(0)),
        };
        match (kind, index) {
            ("auto", _) if text == "auto" => Ok(Self::Auto),
            ("cpu", _) if text == "cpu" => Ok(Self::Cpu),
            ("wgpu", Some(n)) => Ok(Self::Wgpu(n)),
            ("cuda", Some(n)) => Ok(Self::Cuda(n)),
            _ => Err(TensorError::NoSuchDevice {
                name: text.to_owned(),
                reason: "expected auto, cpu, wgpu[:n] or cuda[:n]".to_owned(),
            }),
        }
    }
}

/// An entry of [`Device::list`]: a device of this machine, or a kind of device that is not available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name to pass to [`Device::open`], such as `wgpu:0`; only the kind if no such device is available.
    pub name: String,
    /// Vendor, model and driver, or the reason why no device of this kind is available.
    pub about: String,
    /// Whether the device can be opened.
    pub usable: bool,
    /// Whether it is a real GPU, or a kind of GPU that is not available. False for the CPU and for software
    /// adapters of wgpu.
    pub gpu: bool,
}

impl Device {
    /// Opens the device of this name. `threads` is used for the CPU only.
    ///
    /// Errors: [`TensorError::NoSuchDevice`] with the reason: not in this build, no driver, or no device of
    /// this number.
    pub fn open(name: DeviceName, threads: usize) -> Result<Self> {
        match name {
            DeviceName::Auto => {
                let best = Self::list().into_iter().find(|found| found.usable && found.gpu);
                match best.map(|found| found.name.parse()).transpose()? {
                    Some(name) => Self::open(name, threads),
                    None => Self::cpu(threads),
                }
            }
            DeviceName::Cpu => Self::cpu(threads),
            #[cfg(feature = "wgpu")]
            DeviceName::Wgpu(index) => Self::wgpu(index),
            #[cfg(feature = "cuda")]
            DeviceName::Cuda(index) => Self::cuda(index),
            #[cfg(not(all(feature = "wgpu", feature = "cuda")))]
            other => Err(TensorError::NoSuchDevice { name: other.to_string(), reason: not_built(other) }),
        }
    }

    /// Lists the devices of this machine: CUDA's, then wgpu's, then the CPU. A kind without devices has one
    /// entry with the reason.
    #[must_use]
    pub fn list() -> Vec<DeviceInfo> {
        let mut found = cuda();
        found.extend(wgpu());
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let about = format!("{cores} threads, {}", std::env::consts::ARCH);
        found.push(DeviceInfo { name: "cpu".to_owned(), about, usable: true, gpu: false });
        found
    }
}

/// Returns the message for a kind of device that this build does not contain.
#[cfg(not(all(feature = "wgpu", feature = "cuda")))]
fn not_built(name: DeviceName) -> String {
    let feature = if matches!(name, DeviceName::Cuda(_)) { "cuda" } else { "wgpu" };
    format!("this build has no {feature}: build it with `--features {feature}`")
}

fn missing(name: &str, about: String) -> Vec<DeviceInfo> {
    vec![DeviceInfo { name: name.to_owned(), about, usable: false, gpu: true }]
}

#[cfg(feature = "cuda")]
fn cuda() -> Vec<DeviceInfo> {
    let about = |name: String, driver: &str| DeviceInfo {
        name,
        about: format!("NVIDIA GPU (CUDA, {driver})"),
        usable: true,
        gpu: true,
    };
    let driver = nvidia_driver();
    match (crate::backend::cube::open::cuda_count(), driver) {
        (Ok(count), driver) if count > 0 => {
            let driver = driver.unwrap_or_else(|| "driver of unknown version".to_owned());
            (0..count).map(|n| about(DeviceName::Cuda(n).to_string(), &driver)).collect()
        }
        (Ok(_), Some(driver)) => missing("cuda", format!("{driver} reports no GPU")),
        (Ok(_), None) => missing("cuda", "there is no NVIDIA driver".to_owned()),
        (Err(reason), _) => missing("cuda", reason),
    }
}

/// Returns the driver version that the kernel module reports.
#[cfg(feature = "cuda")]
fn nvidia_driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let version =
        text.lines().next()?.split_whitespace().find(|w| w.starts_with(|c: char| c.is_ascii_digit()))?;
    Some(format!("driver {version}"))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Vec<DeviceInfo> {
    missing("cuda", not_built(DeviceName::Cuda(0)))
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Vec<DeviceInfo> {
    let adapters = crate::backend::cube::open::adapters::list();
    if adapters.is_empty() {
        return missing("wgpu", crate::backend::cube::open::adapters::NONE.to_owned());
    }
    let found = |(n, a): (usize, crate::backend::cube::open::adapters::Adapter)| DeviceInfo {
        name: DeviceName::Wgpu(n).to_string(),
        about: a.about,
        usable: true,
        gpu: !a.software,
    };
    adapters.into_iter().enumerate().map(found).collect()
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Vec<DeviceInfo> {
    missing("wgpu", not_built(DeviceName::Wgpu(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_others_are_refused() {
        for (text, name) in [
            ("auto", DeviceName::Auto),
            ("cpu", DeviceName::Cpu),
            ("wgpu", DeviceName::Wgpu(0)),
            ("wgpu:3", DeviceName::Wgpu(3)),
            ("cuda", DeviceName::Cuda(0)),
            ("cuda:1", DeviceName::Cuda(1)),
        ] {
            assert_eq!(text.parse::<DeviceName>().unwrap(), name);
            assert_eq!(name.to_string().parse::<DeviceName>().unwrap(), name);
        }
        for text in ["", "gpu", "cpu:1", "auto:0", "wgpu:", "wgpu:-1", "cuda:x", "CUDA"] {
            let error = text.parse::<DeviceName>().unwrap_err().to_string();
            assert!(error.contains("wgpu[:n]"), "{error}");
        }
    }

    #[test]
    fn the_processor_is_always_there_and_missing_kinds_say_why() {
        let all = Device::list();
        assert_eq!(all.last().unwrap().name, "cpu");
        for found in &all {
            assert!(!found.about.is_empty());
            if found.usable {
                Device::open(found.name.parse().unwrap(), 1).unwrap();
            } else {
                let error = Device::open(found.name.parse().unwrap(), 1).unwrap_err().to_string();
                assert!(error.contains(&found.name), "{error}");
            }
        }
        Device::open(DeviceName::Auto, 1).unwrap();
    }
}
