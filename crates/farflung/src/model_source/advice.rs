//! What a user may have meant by a path that is no model, and what to do then.

use std::env;
use std::path::{Path, PathBuf};

use farflung_zoo::file_kind::FileKind;

use super::paths::{CONFIG, cached, folder_of, names};
use crate::config::nearest::nearest;
use crate::error::ModelError;
use crate::{Error, run_dir};

/// What to do about weights without a configuration.
pub(super) const FOR_NO_CONFIG: &str = "put the model's config.json into the folder";
/// What to do about an adapter of the library peft.
const FOR_ADAPTER: &str = "merge it into its model first (`merge_and_unload` of peft), save that with `save_pretrained`, and give its folder";
/// Endings of files of weights in other formats.
const WEIGHTS: [&str; 9] = ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "h5", "msgpack", "npz"];
/// Most names that a message lists.
const LISTED: usize = 5;

/// Returns the error of a folder that is no model.
pub(super) fn not_a_model(folder: &Path) -> Error {
    let names = names(folder);
    let weights = names.iter().find(|name| {
        let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
        extension.is_some_and(|extension| WEIGHTS.contains(&extension))
    });
    // Checkpoints are not verified here, which would take long for many runs.
    let is_model =
        |path: &Path| path.join(CONFIG).exists() || run_dir::list(path).is_ok_and(|steps| !steps.is_empty());
    let models: Vec<String> = names
        .iter()
        .map(|name| folder.join(name))
        .filter(|path| path.is_dir() && is_model(path))
        .map(|path| path.display().to_string())
        .take(LISTED)
        .collect();
    let (found, advice) = match weights {
        _ if !models.is_empty() => (
            "is not a model, but contains some".to_owned(),
            Some(format!("give one, such as {}", models.join(", "))),
        ),
        Some(weights) if weights.starts_with("adapter_") => {
            ("is an adapter without its model".to_owned(), Some(FOR_ADAPTER.to_owned()))
        }
        Some(weights) => {
            let kind = FileKind::of_file(&folder.join(weights));
            let advice = kind.map_or(FOR_NO_CONFIG, |kind| kind.advice()).to_owned();
            (format!("has {weights}, but no {CONFIG}"), Some(advice))
        }
        None if names.is_empty() => ("is an empty folder".to_owned(), None),
        None if names.iter().any(|name| name == "config.toml" || name == "metrics.jsonl") => {
            ("is the folder of a run that has no checkpoint yet".to_owned(), None)
        }
        None => (format!("has no {CONFIG} and no checkpoints"), None),
    };
    ModelError::NotAModel { path: folder.to_owned(), found, advice }.into()
}

/// Returns what to do about a path at which there is nothing.
pub(super) fn for_missing(path: &Path) -> Option<String> {
    if let Ok(target) = path.read_link() {
        return Some(format!("it is a link to {}, which does not exist", target.display()));
    }
    let text = path.to_str()?.trim_end_matches('/');
    if text.starts_with('~') {
        return Some("the shell has not replaced `~`: give the whole path".to_owned());
    }
    if let Some(name) = hub_name(text.split_once("://").map_or(text, |(_, rest)| rest), text.contains("://"))
    {
        return Some(for_hub_name(&name));
    }
    if text.contains("://") {
        return Some("nothing is downloaded by itself: download the model, and give its folder".to_owned());
    }
    let folder = folder_of(path);
    if !folder.is_dir() {
        let missing =
            folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).last()?;
        return Some(format!("there is no folder {}", missing.display()));
    }
    if let Some(newest) = run_dir::list(&folder).ok().and_then(|mut steps| steps.pop()) {
        let newest = crate::checkpoint::folder(newest);
        return Some(format!("the newest checkpoint of {} is {newest}", folder.display()));
    }
    let name = path.file_name()?.to_str()?;
    let beside = names(&folder);
    if let Some(meant) = nearest(name, beside.iter().map(String::as_str)) {
        return Some(format!("did you mean {}?", path.with_file_name(meant).display()));
    }
    (text == name && path.extension().is_none()).then(|| for_hub_name(text))
}

/// Returns the name of a model on the Hugging Face Hub, `ORGANISATION/NAME`, if a text looks like one and no
/// such folder begins its path. A URL has the hub's host in front of it.
fn hub_name(text: &str, is_url: bool) -> Option<String> {
    let name = match text.strip_prefix("huggingface.co/").or_else(|| text.strip_prefix("hf.co/")) {
        Some(name) => name.split('/').take(2).collect::<Vec<_>>().join("/"),
        None => text.to_owned(),
    };
    let (organisation, model) = name.split_once('/')?;
    let is_part = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        part.chars().all(allowed) && part.starts_with(|c: char| c.is_ascii_alphanumeric())
    };
    let is_name = is_part(organisation) && is_part(model) && (is_url || !Path::new(organisation).exists());
    is_name.then_some(name)
}

/// Returns what to do if a name is that of a model on the Hugging Face Hub.
fn for_hub_name(name: &str) -> String {
    let in_cache = hub_cache().map(|cache| cache.join(format!("models--{}", name.replace('/', "--"))));
    if let Some(folder) = in_cache.as_deref().and_then(cached) {
        return format!("of the model {name}, your Hugging Face cache has a copy: give {}", folder.display());
    }
    let folder = name.rsplit('/').next().unwrap_or(name);
    format!(
        "if you mean a model on the Hugging Face Hub, which is not downloaded by itself: run `hf download {name} \
         --local-dir {folder}`, and give {folder}"
    )
}

/// Returns the cache of Hugging Face's programs.
fn hub_cache() -> Option<PathBuf> {
    let given = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    given("HF_HUB_CACHE")
        .or_else(|| given("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| given("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| env::home_dir().map(|home| home.join(".cache/huggingface/hub")))
}
