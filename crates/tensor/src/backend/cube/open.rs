//! Finds and opens devices.

use super::Cube;
use crate::{Result, TensorError};

pub(crate) fn open(name: String, device: &cubecl::Device) -> Result<Cube> {
    let mut client = device.client();
    let stream = client.empty(4).stream;
    #[expect(unsafe_code, reason = "cubecl leaves the order of a client's work across threads to its caller")]
    // SAFETY: all work of this handle, from any thread, goes to this one stream in the order of the calls.
    unsafe {
        client.set_stream(stream);
    }
    Cube::new(name, client)
}

/// GPUs available through wgpu, real ones first. The `n` of `wgpu:n` is the index in this list.
#[cfg(feature = "wgpu")]
pub(crate) mod adapters {
    use cubecl::device::{WgpuBackend, WgpuDevice, WgpuDeviceKind};

    use super::{Cube, Result, TensorError, open};

    /// An adapter: description and cubecl device.
    #[derive(Debug)]
    pub(crate) struct Adapter {
        pub(crate) about: String,
        /// Whether it is a software rasteriser that runs on the CPU.
        pub(crate) software: bool,
        device: WgpuDevice,
    }

    /// Error message if there is no adapter.
    pub(crate) const NONE: &str = "no driver for Vulkan, Metal or DirectX 12 reports an adapter";

    /// Lists the adapters of the first graphics API that has any: Vulkan, Metal, DirectX 12.
    pub(crate) fn list() -> Vec<Adapter> {
        let interfaces = [
            (wgpu::Backends::VULKAN, WgpuBackend::Vulkan),
            (wgpu::Backends::METAL, WgpuBackend::Metal),
            (wgpu::Backends::DX12, WgpuBackend::Dx12),
        ];
        let all = interfaces.into_iter().map(|(backends, backend)| {
            let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
                backends,
                ..wgpu::InstanceDescriptor::new_without_display_handle()
            });
            let found = cubecl::future::block_on(instance.enumerate_adapters(backends));
            name(found.iter().map(wgpu::Adapter::get_info), backend)
        });
        let mut found = all.into_iter().find(|found| !found.is_empty()).unwrap_or_default();
        found.sort_by_key(|a| a.software);
        found
    }

    /// Describes adapters. cubecl numbers the adapters of each kind from zero.
    fn name(infos: impl Iterator<Item = wgpu::AdapterInfo>, backend: WgpuBackend) -> Vec<Adapter> {
        let mut seen = Vec::new();
        infos
            .filter_map(|info| {
                let n = seen.iter().filter(|&&kind| kind == info.device_type).count();
                seen.push(info.device_type);
                let (kind, what) = match info.device_type {
                    wgpu::DeviceType::DiscreteGpu => (WgpuDeviceKind::DiscreteGpu(n), "GPU"),
                    wgpu::DeviceType::IntegratedGpu => (WgpuDeviceKind::IntegratedGpu(n), "integrated GPU"),
                    wgpu::DeviceType::VirtualGpu => (WgpuDeviceKind::VirtualGpu(n), "virtual GPU"),
                    // cubecl can open only the first software adapter.
                    wgpu::DeviceType::Cpu if n == 0 => (WgpuDeviceKind::Cpu, "software, for tests"),
                    wgpu::DeviceType::Cpu => return None,
                    wgpu::DeviceType::Other => (WgpuDeviceKind::Other(n), "other"),
                };
                let driver = format!("{} {}", info.driver, info.driver_info);
                Some(Adapter {
                    about: format!("{} ({what}, {}, {})", info.name, info.backend, driver.trim()),
                    software: info.device_type == wgpu::DeviceType::Cpu,
                    device: WgpuDevice::new(kind).on(backend),
                })
            })
            .collect()
    }

    pub(crate) fn open_nth(index: usize) -> Result<Cube> {
        let name = format!("wgpu:{index}");
        let found = list();
        let Some(adapter) = found.get(index) else {
            let reason = match found.len() {
                0 => NONE.to_owned(),
                n => format!("this machine has {n} adapters, numbered from wgpu:0"),
            };
            return Err(TensorError::NoSuchDevice { name, reason });
        };
        let WgpuDevice { kind, backend } = adapter.device.clone();
        let device = cubecl::Device::wgpu(kind)
            .and_then(|device| device.on(backend))
            .map_err(|e| TensorError::NoSuchDevice { name: name.clone(), reason: e.to_string() })?;
        open(name, &device)
    }
}

/// Opens the CUDA device with this index.
#[cfg(feature = "cuda")]
pub(crate) fn cuda(index: usize) -> Result<Cube> {
    let name = format!("cuda:{index}");
    let no = |reason| TensorError::NoSuchDevice { name: name.clone(), reason };
    let device = match cuda_count() {
        Ok(0) => return Err(no("the CUDA driver is missing, or reports no GPU".to_owned())),
        Ok(_) => cubecl::Device::cuda(index).map_err(|e| no(e.to_string()))?,
        Err(reason) => return Err(no(reason)),
    };
    open(name, &device)
}

/// Returns the number of CUDA devices, or the reason why it is unknown.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_count() -> std::result::Result<usize, String> {
    use cubecl::device::DeviceUnavailable;
    // Opening an index that no machine has returns an error that contains the number of devices.
    match cubecl::Device::cuda(usize::from(u16::MAX)) {
        Ok(_) => Err("CUDA reports 65536 devices".to_owned()),
        Err(DeviceUnavailable::NoSuchDevice { available, .. }) => Ok(available),
        Err(e) => Err(e.to_string()),
    }
}
