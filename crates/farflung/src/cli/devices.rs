//! `farflung devices`.

use farflung::Result;
use farflung::tensor::{Device, Found};

/// List the devices that `--device` can name, and say why a kind is missing.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  farflung devices
  farflung devices --json")]
pub(crate) struct DevicesCommand {
    /// Print one JSON object a device.
    #[arg(long)]
    json: bool,
}

impl DevicesCommand {
    pub(crate) fn run(self) -> Result<()> {
        let line = |device: Found| {
            let Found { name, about, usable, gpu, .. } = device;
            if self.json {
                let object =
                    serde_json::json!({ "name": name, "about": about, "usable": usable, "gpu": gpu });
                return format!("{object}\n");
            }
            let mark = if usable { ' ' } else { '-' };
            format!("{mark} {name:<8} {about}\n")
        };
        super::print(&Device::list().into_iter().map(line).collect::<String>())
    }
}
