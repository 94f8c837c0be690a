//! `farflung devices`: lists devices, or measures how fast they train.

use std::time::Duration;

use farflung::measure::{Measured, Trial, measure};
use farflung::model_shape;
use farflung::tensor::{Device, DeviceInfo, DeviceName};
use farflung::train::machine_memory;
use farflung::zoo::ModelSpec;
use farflung::{Error, Result};

/// List the devices that `--device` accepts, and say why a kind is missing; or measure how fast they train.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung devices
  farflung devices --measure --model baby --batch 8 >> topology.toml
  farflung devices --json")]
pub(crate) struct DevicesCommand {
    /// Print one JSON object per device.
    #[arg(long)]
    json: bool,
    /// Train the model for some seconds on each device, time matrix products split among 2, 4 and 8 tensor
    /// ranks, and print the device's entry of a topology file.
    #[arg(long)]
    measure: bool,
    /// Device to list or measure, as for `train --device`. Default: all devices.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Model to measure with: a preset of `train --model`, with bytes as tokens.
    #[arg(long, value_name = "NAME", default_value = "nano", requires = "measure")]
    model: String,
    /// Sequences per step.
    #[arg(long, value_name = "N", default_value_t = 12, requires = "measure")]
    batch: usize,
    /// Threads of the CPU; 0 takes all cores.
    #[arg(long, value_name = "N", default_value_t = 0, requires = "measure")]
    threads: usize,
    /// Time to measure each device, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, requires = "measure")]
    seconds: u64,
}

impl DevicesCommand {
    pub(crate) fn run(self) -> Result<()> {
        let all = Device::list();
        let found: Vec<DeviceInfo> = match &self.device {
            None => all,
            Some(name) => {
                let names: Vec<_> = all.iter().map(|found| found.name.clone()).collect();
                let found: Vec<_> = all.into_iter().filter(|found| found.name == *name).collect();
                if found.is_empty() {
                    let expected = format!("one of {}", names.join(", "));
                    return Err(Error::Setting { field: "device", value: name.clone(), expected });
                }
                found
            }
        };
        if self.measure {
            return found
                .into_iter()
                .filter(|found| found.usable)
                .try_for_each(|found| self.measure_one(&found));
        }
        let line = |device: DeviceInfo| {
            let DeviceInfo { name, about, usable, gpu, .. } = device;
            if self.json {
                let object =
                    serde_json::json!({ "name": name, "about": about, "usable": usable, "gpu": gpu });
                return format!("{object}\n");
            }
            let mark = if usable { ' ' } else { '-' };
            format!("{mark} {name:<8} {about}\n")
        };
        super::print(&found.into_iter().map(line).collect::<String>())
    }

    fn measure_one(&self, found: &DeviceInfo) -> Result<()> {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = if self.threads == 0 { cores() } else { self.threads };
        farflung::threads::check(threads, 1)?;
        let name: DeviceName = found.name.parse()?;
        let device = Device::open(name, threads)?;
        let model = ModelSpec { vocab: 256, ..model_shape(&self.model)? };
        let memory = machine_memory().filter(|_| !found.gpu);
        let time = Duration::from_secs(self.seconds);
        tracing::info!(device = found.name, seconds = self.seconds, "measuring");
        let trial = Trial { name: &self.model, model, batch: self.batch, time, seed: 1 };
        let measured = Measured { memory, ..measure(&device, &trial)? };
        if self.json {
            let text = serde_json::to_string(&measured).expect("numbers and names can be written as JSON");
            return super::print(&format!("{text}\n"));
        }
        super::print(&measured.to_string())
    }
}
