//! Sends a gradient ten times through int8 with error feedback, and prints bytes, ratio and error.

use farflung_compress::{
    CompressError, Compressor, ErrorFeedback, Int8, Payload, PayloadRef, RoundKey, State,
};

fn main() -> Result<(), CompressError> {
    let gradient: Vec<f32> = (0..1_000_000).map(|i| (i as f32 * 0.37).sin() * 1e-3).collect();
    let mut codec = ErrorFeedback::new(Int8::new(256)?);
    let mut payload = Payload::new();
    let mut decoded = vec![0.0; gradient.len()];
    let mut received = vec![0.0_f64; gradient.len()];

    println!("round  bytes    ratio  error of one  error of the mean");
    for round in 0..10 {
        let key = RoundKey { seed: 1, round, ..RoundKey::default() };
        codec.compress(&gradient, key, &mut payload)?;
        // A receiver does this with the bytes from its socket.
        codec.decompress(PayloadRef::parse(payload.as_bytes())?, &mut decoded)?;
        codec.commit();

        for (sum, d) in received.iter_mut().zip(&decoded) {
            *sum += f64::from(*d);
        }
        let one = relative_error(&gradient, decoded.iter().map(|d| f64::from(*d)));
        let mean = relative_error(&gradient, received.iter().map(|sum| sum / (round + 1) as f64));
        let bytes = payload.as_bytes().len();
        let ratio = size_of_val(gradient.as_slice()) as f64 / bytes as f64;
        println!("{round:5}  {bytes}  {ratio:.3}  {one:12.2e}  {mean:17.2e}");
    }
    println!("Feedback sends later what was lost before: the mean gets better, one round alone does not.");
    Ok(())
}

fn relative_error(wanted: &[f32], found: impl Iterator<Item = f64>) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (w, f) in wanted.iter().zip(found) {
        error += (f64::from(*w) - f).powi(2);
        norm += f64::from(*w).powi(2);
    }
    (error / norm).sqrt()
}
